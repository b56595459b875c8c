"""`zckpt demo`: train, save, restore, compare."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from zckpt.cli.errors import DIFFERS, FINE
from zckpt.cli.output import (
    AsJson,
    Quiet,
    loss_document,
    print_json,
    print_notes,
    spinner,
    stdout,
)

if TYPE_CHECKING:
    from zckpt.testing.demo import DemoReport, Evaluation

EXAMPLES = (
    "zckpt demo",
    "zckpt demo /tmp/zckpt-demo --overwrite --ranks 4 --reload-ranks 1",
    "zckpt demo --steps 100 --json",
)


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")] = Path(
        "zckpt-demo"
    ),
    *,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that train and save.")] = 2,
    reload_ranks: Annotated[int, typer.Option(min=1, help="Ranks that load it again.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint at OUT.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a small GPT-2 under ZeRO-3, save it, load it three ways, compare the losses.

    On this machine's CPU, with DeepSpeed itself, in under a minute. All losses have to agree.
    """
    from zckpt.testing import demo

    with spinner(quiet=quiet) as tell:
        report = demo.run(
            out,
            ranks=ranks,
            reload_ranks=reload_ranks,
            steps=steps,
            overwrite=overwrite,
            tell=tell,
        )
    (_print_document if as_json else _print)(report)
    program = sys.argv[0] if Path(sys.argv[0]).name == "zckpt" else "python -m zckpt"
    notes = (
        f"look at it with: {program} inspect {out}",
        f"check it with:   {program} verify {out} --eval zckpt.testing.demo:evaluate_checkpoint",
    )
    print_notes(notes, quiet=quiet)
    raise typer.Exit(FINE if report.is_fine else DIFFERS)


def _print_document(report: "DemoReport") -> None:
    print_json(
        {
            "path": report.path,
            "is_fine": report.is_fine,
            "before_training": loss_document(report.before),
            "recorded": loss_document(report.recorded),
            "evaluations": [
                {
                    "what": evaluation.what,
                    "losses": [loss_document(loss) for loss in evaluation.losses],
                    "is_equal": evaluation.is_equal,
                }
                for evaluation in report.evaluations
            ],
            "files": {path.name: path.stat().st_size for path in sorted(report.path.iterdir())},
            "seconds": {stage: round(value, 3) for stage, value in report.seconds.items()},
        }
    )


def _print(report: "DemoReport") -> None:
    table = Table("evaluation", "loss", "exactly", "as recorded", box=box.SIMPLE_HEAD)
    table.add_row("before training", f"{report.before:.6f}", report.before.hex(), "")
    live, *loaded = report.evaluations
    _add(table, live)
    table.add_row("recorded", f"{report.recorded:.6f}", report.recorded.hex(), "")
    for evaluation in loaded:
        _add(table, evaluation)
    console = stdout()
    console.print(table)
    files = ", ".join(path.name for path in sorted(report.path.iterdir()))
    console.print(f"files    {report.path}: {files}", markup=False, soft_wrap=True)
    times = ", ".join(f"{stage} {value:.1f} s" for stage, value in report.seconds.items())
    console.print(f"times    {times}", markup=False, soft_wrap=True)
    verdict = (
        Text.assemble(("fine", "bold green"), ": the same model everywhere, bit for bit")
        if report.is_fine
        else Text.assemble(("differs", "bold yellow"), ": not the same model everywhere")
    )
    console.print(verdict)


def _add(table: Table, evaluation: "Evaluation") -> None:
    """Add a row, with a line for each different loss of its ranks."""
    losses = dict.fromkeys(evaluation.losses)
    table.add_row(
        evaluation.what,
        "\n".join(f"{loss:.6f}" for loss in losses),
        "\n".join(loss.hex() for loss in losses),
        Text("yes", "green") if evaluation.is_equal else Text("no", "bold red"),
    )
