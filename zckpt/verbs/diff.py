"""`diff`: which tensors of two checkpoints are not the same, and how far they are apart."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zckpt.comparison import Match, Outcome, Row, Rule, compare, match
from zckpt.errors import UsageError
from zckpt.names import as_patterns, listed, matches_any
from zckpt.sources.checkpoint import Checkpoint
from zckpt.sources.opening import open as open_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """Every name of two checkpoints, and how what it means in one compares with the other."""

    a: Path
    """The folder or file that was read as A; of a ZeRO folder, that of the tag."""
    b: Path
    rows: tuple[Row, ...]
    """One a name, aliases too: A's names in its order, then those that only B has."""
    tensors_compared: int
    """Distinct pairs of stored tensors; names that share one are compared once."""
    read_bytes: int
    """Bytes that were compared, of both sides together."""
    rtol: float
    atol: float
    notes: tuple[str, ...]
    """What is no difference and deserves a look, as sentences."""

    @property
    def is_same(self) -> bool:
        """Whether no row is a difference: all are equal, or close within the tolerances."""
        return not any(row.is_difference for row in self.rows)

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """How many rows have each outcome that occurs."""
        return Counter(row.outcome for row in self.rows)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rtol: float = 0.0,
    atol: float = 0.0,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints tensor by tensor, whatever each of them is.

    Local; reads only; needs no deepspeed. A ZeRO folder gives its fp32 masters. Neither the CRC-32
    in its files nor the digests of a manifest are checked.

    Without a tolerance values are equal where their bits are: -0.0 is not 0.0, a NaN equals only
    the same NaN. Tensors of different dtypes differ, whatever their values, which are compared as
    numbers then: a bf16 tensor is apart from its fp32 master by a `max_rel` of at most 2**-8.
    (`verify` says, with `against`, whether it is the rounded master.) Which names are one tensor is
    no difference but a note, as long as each name has the same values.

    **Memory:** a few MiB a thread, however large the tensors.

    Args:
        a: a zckpt or Hugging Face folder, one safetensors file, or a ZeRO folder.
        b: another.
        tag_a: which checkpoint of a ZeRO folder; without it the one that `latest` names.
        tag_b: the same for B.
        include: a shell-style pattern, or several; only names that match one are compared.
        exclude: the same of names that are not.
        rtol: accept elements where |a - b| is at most this share of the larger of |a| and |b|.
        atol: accept elements where |a - b| is at most this. Either suffices. NaNs are then equal,
            and so are the zeros; a NaN and a number never are.
        jobs: threads; by default one a core.
        progress: called with (bytes read so far, bytes in all), of both sides together.

    Raises:
        NotACheckpointError: there is nothing to compare at a path.
        CorruptCheckpointError: what is there contradicts itself.
        UnsupportedError: a ZeRO folder of a kind that zckpt does not put together.
        UsageError: a tolerance is negative or not finite, `jobs` is no number of threads, or no
            name matches the patterns.
    """
    _check_arguments(rtol, atol, jobs)
    wanted, unwanted = as_patterns(include), as_patterns(exclude)

    def is_wanted(name: str) -> bool:
        return (not wanted or matches_any(name, wanted)) and not matches_any(name, unwanted)

    one, other = open_checkpoint(a, tag=tag_a), open_checkpoint(b, tag=tag_b)
    matched = match(one, other, keep=is_wanted)
    if not matched.names and (one or other):
        raise UsageError(
            "of these names none matches include and not exclude: "
            f"{listed(dict.fromkeys([*other, *one]))}."
        )
    return DiffReport(
        a=one.path,
        b=other.path,
        rows=compare(matched, Rule(rtol=rtol, atol=atol), jobs=jobs, progress=progress),
        tensors_compared=sum(x.shape == y.shape for x, y in matched.pairs),
        read_bytes=matched.read_bytes,
        rtol=rtol,
        atol=atol,
        notes=(*_own_notes(one, "A"), *_own_notes(other, "B"), *matched.notes, *_ties(matched)),
    )


def _check_arguments(rtol: float, atol: float, jobs: int | None) -> None:
    for word, value in (("rtol", rtol), ("atol", atol)):
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{word} must be a finite number that is not negative, got {value}.")
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be a number of threads, got {jobs}.")


def _own_notes(checkpoint: Checkpoint, label: str) -> Iterator[str]:
    for note in checkpoint.notes:
        yield f"{label}: {note}"


def _ties(matched: Match) -> Iterator[str]:
    for groups, here, there in ((matched.tied_in_a, "A", "B"), (matched.tied_in_b, "B", "A")):
        for names in groups:
            yield f"{listed(names)}: one tensor in {here}, stored as several in {there}"
