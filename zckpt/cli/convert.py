"""`zckpt convert`: from a ZeRO folder to safetensors, offline."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from zckpt.cli.errors import INTERRUPTED
from zckpt.cli.output import (
    AsJson,
    Quiet,
    byte_bar,
    count,
    human,
    print_json,
    print_notes,
    stderr,
    stdout,
)
from zckpt.names import listed

if TYPE_CHECKING:
    from zckpt.verbs.convert import ConvertReport

EXAMPLES = (
    "zckpt convert runs/7b out/7b --dry-run",
    "zckpt convert runs/7b out/7b --dtype bf16 --assets models/7b",
    "zckpt convert runs/7b out/step-500 --tag global_step500 --max-shard-size 10GB",
    "zckpt convert runs/lora out/lora --exclude-frozen --include '*lora_*'",
)

Globs = list[str] | None


def command(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="What DeepSpeed's save_checkpoint wrote: a run's folder, or that of a tag in it.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder to make. It appears whole or not at all."),
    ],
    *,
    tag: Annotated[
        str | None,
        typer.Option(help="Which checkpoint of the run; else the one that 'latest' names."),
    ] = None,
    dtype: Annotated[
        Literal["keep", "fp32", "bf16", "fp16"],
        typer.Option(
            help="keep: fp32 masters and all else as stored. Others: what floating parameters are "
            "cast to, rounded once; buffers never are."
        ),
    ] = "keep",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file, such as 500MB or 10GB.")
    ] = "5GB",
    include: Annotated[
        Globs, typer.Option(metavar="GLOB", help="Convert only these names. Repeatable.")
    ] = None,
    exclude: Annotated[
        Globs, typer.Option(metavar="GLOB", help="Leave out these names. Repeatable.")
    ] = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out what the optimizer does not hold.")
    ] = False,
    allow_missing: Annotated[
        Globs,
        typer.Option(
            metavar="GLOB",
            help="Go on without these parameters where the folder lacks them. Repeatable.",
        ),
    ] = None,
    allow_global: Annotated[
        Globs,
        typer.Option(
            metavar="NAME",
            help="Read past calls of this function or class in the pickles, without calling it. "
            "Repeatable.",
        ),
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Copy config and tokenizer from here, so that from_pretrained works on OUT.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="one a core")
    ] = None,
    no_digest: Annotated[
        bool, typer.Option("--no-digest", help="Do not hash tensors; 'verify' compares less then.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the zckpt checkpoint at OUT.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Convert a ZeRO folder, of any stage and ranks, into safetensors.

    OUT is what save_consolidated would have written at that step, with a
    manifest for 'inspect' and 'verify'. Needs neither DeepSpeed nor the training
    code, runs nothing that is in the folder, and takes a few MiB a thread.
    """
    before = _inode(out)
    try:
        from zckpt.verbs.convert import convert

        with byte_bar("converting", quiet=quiet) as advance:
            report = convert(
                src,
                out,
                tag=tag,
                dtype=dtype,
                max_shard_size=_size(max_shard_size),
                include=include or (),
                exclude=exclude or (),
                exclude_frozen=exclude_frozen,
                allow_missing=allow_missing or (),
                allow_global=allow_global or (),
                assets=assets,
                jobs=jobs,
                digest=not no_digest,
                overwrite=overwrite,
                dry_run=dry_run,
                progress=advance,
            )
    except KeyboardInterrupt:
        stderr().print(_interrupted(out, before), markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    print_notes(report.notes, quiet=quiet)
    (_print_document if as_json else _print)(report, dry_run)


def _size(text: str) -> int | str:
    """Return a size as `convert` takes it; digits alone are bytes."""
    return int(text) if text.isdecimal() else text


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _interrupted(out: Path, before: int | None) -> str:
    """Return what an interrupt left, by what is at OUT now and what was there before."""
    now = _inode(out)
    if now != before:
        return f"interrupted when {out} was complete"
    return f"interrupted; {'nothing was left at' if now is None else 'nothing changed at'} {out}"


def _print_document(report: "ConvertReport", is_dry: bool) -> None:
    print_json(
        {
            "source": report.source,
            "path": report.path,
            "tag": report.tag,
            "is_dry_run": is_dry,
            "files": report.files,
            "tensors": report.tensors,
            "size_bytes": report.size_bytes,
            "read_bytes": report.read_bytes,
            "memory_bytes": report.memory_bytes,
            "estimated_s": round(report.estimated_s, 3) if is_dry else None,
            "jobs": report.jobs,
            "aliases": report.aliases,
            "left_out": report.left_out,
            "seconds": {phase: round(value, 3) for phase, value in report.seconds.items()},
            "notes": report.notes,
        }
    )


def _print(report: "ConvertReport", is_dry: bool) -> None:
    console = stdout()
    for title, value in _facts(report, is_dry=is_dry):
        console.print(Text.assemble((f"{title:10}", "bold"), value), soft_wrap=True)
    verdict = (
        Text.assemble(("dry run", "bold yellow"), f": nothing was written to {report.path}")
        if is_dry
        else Text.assemble(("written", "bold green"), f": {report.path}")
    )
    console.print(verdict, soft_wrap=True)


def _facts(report: "ConvertReport", *, is_dry: bool) -> Iterator[tuple[str, str]]:
    yield "from", str(report.source)
    files = count(len(report.files), "file")
    stored = f"{count(report.tensors, 'tensor')}, {human(report.size_bytes)} in {files}"
    yield "tensors", stored
    if is_dry:
        yield from _files(report)
    if report.aliases:
        pairs = [f"{alias} -> {owner}" for alias, owner in report.aliases.items()]
        yield "aliases", f"{count(len(pairs), 'more name')}: {listed(pairs)}"
    for reason in dict.fromkeys(left.reason for left in report.left_out):
        names = [left.name for left in report.left_out if left.reason == reason]
        yield "left out", f"{count(len(names), 'name')}, {reason}: {listed(names)}"
    threads = count(report.jobs, "thread")
    if is_dry:
        yield "reads", human(report.read_bytes)
        yield "memory", f"about {human(report.memory_bytes)} in {threads}"
        yield "time", f"about {report.estimated_s:.1f} s, by the speed of the first tensors"
    else:
        seconds = sum(report.seconds.values())
        is_telling = report.size_bytes > 10_000_000
        rate = f", {report.size_bytes / seconds / 1e9:.2f} GB/s" if is_telling else ""
        yield "time", f"{seconds:.2f} s{rate} in {threads}"


_MOST_FILES = 12


def _files(report: "ConvertReport") -> Iterator[tuple[str, str]]:
    """Yield a line for each file, cut after some: --json has all."""
    for name, size_bytes in list(report.files.items())[:_MOST_FILES]:
        yield "", f"{name}  {human(size_bytes)}"
    if len(report.files) > _MOST_FILES:
        yield "", f"and {len(report.files) - _MOST_FILES} more"
