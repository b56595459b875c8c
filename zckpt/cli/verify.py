"""`zckpt verify`: is a checkpoint what its manifest says."""

import contextlib
import importlib
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from zckpt.cli.errors import CORRUPT, DIFFERS, FINE
from zckpt.cli.output import (
    AsJson,
    Quiet,
    byte_bar,
    count,
    human,
    loss_document,
    print_json,
    print_notes,
    spinner,
    stdout,
)
from zckpt.errors import UsageError

if TYPE_CHECKING:
    from zckpt.verbs.verify import VerifyReport

EXAMPLES = (
    "zckpt verify out/checkpoint-500",
    "zckpt verify out/checkpoint-500 --eval my_eval:held_out_loss --rtol 1e-6",
    "zckpt verify out/checkpoint-500 --headers-only --json",
    "zckpt verify out/checkpoint-500 --against checkpoints/run --tag global_step500",
)

Verdict = Literal["fine", "differs", "corrupt"]

_STYLES = {"fine": "bold green", "differs": "bold yellow", "corrupt": "bold red"}
_EXIT_CODES = {"fine": FINE, "differs": DIFFERS, "corrupt": CORRUPT}


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A zckpt or Hugging Face safetensors folder, or one file."
        ),
    ],
    *,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Do not read and hash the tensors.")
    ] = False,
    eval_name: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="MODULE:FUNCTION",
            help="Compare what this function returns for PATH with the recorded loss. The module "
            "is looked for in the current directory too.",
        ),
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Largest difference of the losses, relative to the recorded one.")
    ] = 0.0,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC",
            help="Compare names, shapes and every value with what PATH was made from: a ZeRO, "
            "zckpt or Hugging Face folder. Nothing is written.",
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="TAG",
            help="Which checkpoint of SRC, a ZeRO folder; without it the one that `latest` names.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare a checkpoint with its manifest, its index and itself, and report every difference.

    With --against SRC compare it with what it was made from, too: values have to
    be those of SRC, floating ones rounded once to the dtype in PATH, bit by bit.
    """
    if rtol and eval_name is None:
        raise UsageError("--rtol is about the loss; it needs --eval MODULE:FUNCTION.")
    if tag is not None and against is None:
        raise UsageError("--tag is about SRC; it needs --against SRC.")
    if headers_only and against is not None:
        raise UsageError("--headers-only reads no values, and --against compares them.")
    evaluation = None if eval_name is None else _Evaluation(eval_name, quiet=quiet)
    from zckpt.verbs.verify import verify

    start = time.perf_counter()
    with byte_bar("reading", quiet=quiet) as advance:
        report = verify(
            path,
            headers_only=headers_only,
            eval_fn=evaluation,
            rtol=rtol,
            against=against,
            tag=tag,
            progress=advance,
        )
    seconds = time.perf_counter() - start - (evaluation.seconds if evaluation else 0.0)
    print_notes(report.notes, quiet=quiet)
    (_print_document if as_json else _print)(report, seconds)
    raise typer.Exit(_EXIT_CODES[_verdict(report)])


class _Evaluation:
    """The function of `--eval`: its prints go to stderr, and the time it takes is kept."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._name = name
        self._quiet = quiet
        self._function = _import_function(name)
        self.seconds = 0.0

    def __call__(self, folder: str) -> float:
        start = time.perf_counter()
        try:
            with spinner(quiet=self._quiet) as tell, contextlib.redirect_stdout(sys.stderr):
                tell(f"evaluating with {self._name}")
                loss = float(self._function(folder))
        except (Exception, SystemExit) as error:
            traceback.print_exception(error)
            raise UsageError(
                f"--eval {self._name} raised {type(error).__name__}: {error}"
            ) from error
        self.seconds = time.perf_counter() - start
        return loss


def _import_function(name: str) -> Callable[[str], float]:
    """Return the function that `package.module:function` names; what it prints goes to stderr."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(f"--eval {name}: expected MODULE:FUNCTION, such as my_eval:held_out_loss.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"--eval {name}: cannot import {module_name}: {type(error).__name__}: {error}."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"--eval {name}: {module_name} has no function {attribute}.")
    return cast("Callable[[str], float]", function)


def _verdict(report: "VerifyReport") -> Verdict:
    kinds = {finding.kind for finding in report.findings}
    return "corrupt" if "corrupt" in kinds else "differs" if kinds else "fine"


def _print_document(report: "VerifyReport", seconds: float) -> None:
    print_json(
        {
            "path": report.path,
            "verdict": _verdict(report),
            "findings": report.findings,
            "has_manifest": report.has_manifest,
            "files_checked": report.files_checked,
            "tensors_checked": report.tensors_checked,
            "bytes_checked": report.bytes_checked,
            "against": report.against,
            "tensors_compared": report.tensors_compared,
            "bytes_compared": report.bytes_compared,
            "seconds": round(seconds, 3),
            "recorded_loss": loss_document(report.recorded_loss),
            "loss": loss_document(report.loss),
            "notes": report.notes,
        }
    )


def _print(report: "VerifyReport", seconds: float) -> None:
    console = stdout()
    if report.has_manifest or report.against is not None:
        console.print(_checked(report, seconds), soft_wrap=True)
    if report.loss is not None and report.recorded_loss is not None:
        now, then = report.loss, report.recorded_loss
        console.print(f"loss now       {now!r}  {now.hex()}")
        console.print(f"loss recorded  {then!r}  {then.hex()}")
    verdict = _verdict(report)
    if report.findings:
        table = Table("kind", "where", "what", box=box.SIMPLE_HEAD)
        for finding in report.findings:
            kind = Text(finding.kind, _STYLES[finding.kind])
            where, what = Text(finding.where, overflow="fold"), _shorten_digests(finding.what)
            table.add_row(kind, where, Text(what, overflow="fold"))
        console.print(table)
    found = count(len(report.findings), "finding")
    said = {
        "fine": "all that was compared agrees"
        if report.has_manifest or report.against is not None
        else "headers and index agree; without a manifest nothing else can be compared",
        "differs": found,
        "corrupt": f"{found}; take another copy or checkpoint",
    }
    console.print(
        Text.assemble((verdict, _STYLES[verdict]), f": {report.path}: {said[verdict]}"),
        soft_wrap=True,
    )


def _checked(report: "VerifyReport", seconds: float) -> str:
    parts = [f"{count(report.files_checked, 'file')} compared"]
    read_bytes = report.bytes_checked + report.bytes_compared
    if report.tensors_checked or report.against is None:
        hashed = count(report.tensors_checked, "tensor") if report.tensors_checked else "no tensor"
        parts.append(f"{hashed} hashed")
    if report.against is not None:
        tensors = count(report.tensors_compared, "tensor")
        parts.append(f"{tensors} compared with {report.against}")
    if read_bytes:
        parts.append(f"{human(read_bytes)} in {seconds:.2f} s")
    is_telling = read_bytes > 10_000_000
    return ", ".join(parts) + (f" ({read_bytes / seconds / 1e9:.2f} GB/s)" if is_telling else "")


def _shorten_digests(text: str) -> str:
    """Return the text with the first 12 digits of each digest; `--json` has them whole."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)
