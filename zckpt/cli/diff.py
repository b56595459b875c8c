"""`zckpt diff`: which tensors of two checkpoints are not the same."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from zckpt.cli.errors import DIFFERS, FINE
from zckpt.cli.output import (
    AsJson,
    Quiet,
    byte_bar,
    count,
    human,
    print_json,
    print_notes,
    stdout,
)

if TYPE_CHECKING:
    from zckpt.comparison import Row
    from zckpt.spec import TensorSpec
    from zckpt.verbs.diff import DiffReport

EXAMPLES = (
    "zckpt diff checkpoints/run out/checkpoint-500",
    "zckpt diff checkpoints/run checkpoints/run --tag-a global_step500 --include 'model.norm.*'",
    "zckpt diff out/checkpoint-500 hf-model --rtol 1e-2 --all --json",
)

_PLACE = "A zckpt or Hugging Face safetensors folder, one such file, or a ZeRO folder."
_TAG = "Which checkpoint of {}, a ZeRO folder; without it the one that `latest` names."


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help=_PLACE)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    *,
    tag_a: Annotated[str | None, typer.Option(metavar="TAG", help=_TAG.format("A"))] = None,
    tag_b: Annotated[str | None, typer.Option(metavar="TAG", help=_TAG.format("B"))] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Compare only names like this; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Leave out names like this; may be repeated."),
    ] = None,
    rtol: Annotated[
        float,
        typer.Option(help="Accept elements that differ by this share of the larger of the two."),
    ] = 0.0,
    atol: Annotated[float, typer.Option(help="Accept elements that differ by this.")] = 0.0,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show the names that are equal or close too.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints name by name; show every difference.

    Values are equal where their bits are, unless a tolerance is given.

    Another dtype is a difference whatever the values. Whether they were rounded
    right says `zckpt verify OUT --against SRC`.

    max abs and max rel are the largest |a - b|, as it is and relative to the
    larger of |a| and |b|; infinite where only one is a NaN.
    """
    from zckpt.verbs.diff import diff

    with byte_bar("comparing", quiet=quiet) as advance:
        report = diff(
            a,
            b,
            tag_a=tag_a,
            tag_b=tag_b,
            include=include or (),
            exclude=exclude or (),
            rtol=rtol,
            atol=atol,
            progress=advance,
        )
    print_notes(report.notes, quiet=quiet)
    rows = [row for row in report.rows if show_all or row.is_difference]
    (_print_document if as_json else _print)(report, rows)
    raise typer.Exit(FINE if report.is_same else DIFFERS)


def _print_document(report: "DiffReport", rows: "list[Row]") -> None:
    print_json(
        {
            "a": report.a,
            "b": report.b,
            "is_same": report.is_same,
            "counts": report.counts,
            "rows": [
                {
                    "name": row.name,
                    "outcome": row.outcome,
                    "a": _spec_document(row.a),
                    "b": _spec_document(row.b),
                    "differing_numel": row.differing_numel,
                    "max_abs": _number(row.max_abs),
                    "max_rel": _number(row.max_rel),
                }
                for row in rows
            ],
            "tensors_compared": report.tensors_compared,
            "read_bytes": report.read_bytes,
            "rtol": report.rtol,
            "atol": report.atol,
            "notes": report.notes,
        }
    )


def _spec_document(spec: "TensorSpec | None") -> dict[str, Any] | None:
    if spec is None:
        return None
    return {"stored_as": spec.name, "shape": spec.shape, "dtype": spec.dtype.name}


def _number(value: float | None) -> float | str | None:
    """Return a number for JSON, which has no infinity: that is the text "inf"."""
    return str(value) if value is not None and math.isinf(value) else value


def _print(report: "DiffReport", rows: "list[Row]") -> None:
    console = stdout()
    if rows:
        table = Table("what", "name", "tensor", box=box.SIMPLE_HEAD)
        for header in ("differing", "max abs", "max rel"):
            table.add_column(header, no_wrap=True)
        for row in rows:
            style = "yellow" if row.is_difference else "green"
            table.add_row(
                Text(row.outcome, style), *(Text(t, overflow="fold") for t in _cells(row))
            )
        console.print(table)
    is_same = report.is_same
    verdict = ("same", "bold green") if is_same else ("differs", "bold yellow")
    console.print(
        Text.assemble(verdict, f": {report.a} and {report.b}: {_summary(report)}"), soft_wrap=True
    )


def _cells(row: "Row") -> Iterator[str]:
    sides = [spec for spec in (row.a, row.b) if spec is not None]
    yield row.name
    yield f"{_both(str(list(s.shape)) for s in sides)} {_both(s.dtype.name for s in sides)}"
    if row.differing_numel is not None:
        yield f"{row.differing_numel:,} of {sides[0].numel:,}"
        yield f"{row.max_abs:.3g}"
        yield f"{row.max_rel:.3g}"


def _both(words: Iterable[str]) -> str:
    """Return what A and B say: once where it is the same."""
    return " -> ".join(dict.fromkeys(words))


_WORDS = {
    "equal": "equal",
    "close": "within the tolerance",
    "differs": "with other values",
    "dtype": "of another dtype",
    "shape": "of another shape",
}


def _summary(report: "DiffReport") -> str:
    """Return how many names there are, how many of each kind, and how much was read."""
    kinds = ", ".join(
        f"{report.counts[outcome]:,} {_WORDS.get(outcome, outcome)}"
        for outcome in sorted(report.counts)
    )
    read = f"{count(report.tensors_compared, 'pair')} of tensors, {human(report.read_bytes)} read"
    return f"{count(len(report.rows), 'name')}: {kinds or 'nothing to compare'} ({read})"
