"""Where a command's words go: data to stdout, everything else to stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich import filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: enough that no row of a table is folded."""

_BAR_AFTER_S = 1.0
"""Work that is done sooner shows no bar."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no notes.")]


def stdout() -> Console:
    """Return the console for data."""
    return _console(Console(highlight=False))


def stderr() -> Console:
    """Return the console for everything else."""
    return _console(Console(highlight=False, stderr=True))


def _console(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def print_json(document: dict[str, Any]) -> None:
    """Print a document of builtins, dataclasses and msgspec structs as JSON; paths as text."""
    text = msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2)
    sys.stdout.write(text.decode() + "\n")


def print_notes(notes: tuple[str, ...], *, quiet: bool) -> None:
    """Print notes to stderr, one a line, unless `quiet`."""
    for note in () if quiet else notes:
        stderr().print(f"note: {note}", style="dim", markup=False, soft_wrap=True)


def human(size_bytes: int) -> str:
    """Return a size to read: 1 kB is 1,000 bytes."""
    return filesize.decimal(size_bytes)


def count(number: int, noun: str) -> str:
    """Return a number of things to read, such as `1 file` or `1,024 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def loss_document(loss: float | None) -> dict[str, str] | None:
    """Return a loss for JSON, as the manifest has it: in decimal, and exactly."""
    return None if loss is None else {"decimal": repr(loss), "hex": loss.hex()}


@contextlib.contextmanager
def byte_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in all) that shows a bar, on a terminal only.

    With the rate and the time left; work of a second shows nothing.
    """
    console = stderr()
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=quiet or not console.is_terminal,
    )
    task = bar.add_task(what)
    began = time.perf_counter()

    def advance(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()
        elif time.perf_counter() - began > _BAR_AFTER_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


@contextlib.contextmanager
def spinner(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows the name of what goes on now, on a terminal only."""
    console = stderr()
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=quiet or not console.is_terminal,
    )

    def tell(stage: str) -> None:
        for task in progress.tasks:
            progress.update(task.id, total=1, completed=1)
        progress.add_task(stage, total=None)

    with progress:
        yield tell
