"""Two checkpoints side by side: which of their names mean the same, and how far values are apart.

Nothing is held but chunks: however large the tensors, a thread needs a few MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zckpt.digests import Block, blocks_of
from zckpt.names import listed, reconcile_prefix
from zckpt.sources.checkpoint import Checkpoint
from zckpt.sources.consolidated import Consolidated
from zckpt.spec import TensorSpec
from zckpt.tensors import as_bits, chunks, same_bits

Outcome = Literal["equal", "close", "differs", "dtype", "shape", "only in A", "only in B"]

# ------------------------------------------------------------------ values


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What counts as equal.

    Without a tolerance it is the bits: -0.0 is not 0.0, and a NaN equals only the same NaN. An
    element is accepted where it is within either tolerance.
    """

    rtol: float = 0.0
    """Largest accepted |a - b|, relative to the larger of |a| and |b|."""
    atol: float = 0.0
    """Largest accepted |a - b|."""
    casts: bool = False
    """Whether floating values of A are first rounded to the dtype that B has, as a save does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two tensors, or parts of them, are apart. The gap of several parts is the sum.

    Distances are taken in float64 (in integers where both are integers or bools). Where one of two
    elements is a NaN, or they are different infinities, the distance is infinite; between two NaNs
    it is 0. The distance of complex numbers is that in the plane.
    """

    differing_numel: int = 0
    """Elements whose bits differ; where dtypes differ, elements whose values do."""
    beyond_numel: int = 0
    """Those of them that no tolerance accepts."""
    max_abs: float = 0.0
    """Largest |a - b|."""
    max_rel: float = 0.0
    """Largest |a - b|, relative to the larger of |a| and |b|: from 0 to 2, or infinite."""

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            differing_numel=self.differing_numel + other.differing_numel,
            beyond_numel=self.beyond_numel + other.beyond_numel,
            max_abs=max(self.max_abs, other.max_abs),
            max_rel=max(self.max_rel, other.max_rel),
        )


def gap_between(a: Tensor, b: Tensor, rule: Rule) -> Gap:
    """Return how far two flat tensors of one length are apart. Memory: 2 MiB beyond the two."""
    if rule.casts and a.dtype.is_floating_point and b.dtype.is_floating_point:
        a = _rounded_to(b, a)
    if a.dtype == b.dtype and same_bits(a, b):
        return Gap()
    starts = range(0, a.numel(), _MEASURED_NUMEL)
    pieces = [slice(start, start + _MEASURED_NUMEL) for start in starts]
    return _sum(_measure(a[piece], b[piece], rule) for piece in pieces)


def _sum(gaps: Iterable[Gap]) -> Gap:
    return sum(gaps, Gap())


_MEASURED_NUMEL = 1 << 14
"""Elements measured at a time: so few that torch starts no threads of its own beside ours, and that
what is computed of them stays in the processor's cache."""


def _rounded_to(like: Tensor, values: Tensor) -> Tensor:
    """Return the values in the dtype of `like`, and its own NaN where both have one.

    Which NaN a cast makes of a NaN depends on where in a vector of the processor it stands.
    """
    rounded = values.to(like.dtype)
    if rounded.dtype == values.dtype or same_bits(rounded, like):
        return rounded
    both_nan = _is_nan(rounded) & _is_nan(like)
    as_bits(rounded)[both_nan] = as_bits(like)[both_nan]
    return rounded


def _is_nan(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.element_size() < 4 else values.dtype).isnan()


def _measure(a: Tensor, b: Tensor, rule: Rule) -> Gap:
    wide_a, wide_b = _widened(a), _widened(b)
    distance = _integer_distance(a, b) if _are_integers(a, b) else _distance(wide_a, wide_b)
    relative = distance / torch.maximum(wide_a.abs(), wide_b.abs())
    relative = _nan_as_infinity(relative.masked_fill_(distance == 0.0, 0.0))
    differs = as_bits(a) != as_bits(b) if a.dtype == b.dtype else distance > 0.0
    beyond = differs
    if rule.rtol or rule.atol:
        beyond = differs & (distance > rule.atol) & (relative > rule.rtol)
    return Gap(
        differing_numel=int(differs.sum()),
        beyond_numel=int(beyond.sum()),
        max_abs=float(distance.max()),
        max_rel=float(relative.max()),
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    is_none = (a == b) | (a.isnan() & b.isnan())  # infinity minus itself would be a NaN
    return _nan_as_infinity((a - b).abs()).masked_fill_(is_none, 0.0)


def _nan_as_infinity(values: Tensor) -> Tensor:
    return values.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _are_integers(*tensors: Tensor) -> bool:
    return not any(t.is_floating_point() or t.is_complex() for t in tensors)


def _integer_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| in float64, rounded once: float64 alone would not tell 2**53 from the next."""
    (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
    return ((high_a - high_b).to(torch.float64) * 2.0**32 + (low_a - low_b)).abs()


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of integers, the lower ones without a sign."""
    if values.dtype == torch.uint64:
        bits = values.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = values.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF


# ------------------------------------------------------------------ names


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which names of two checkpoints mean which of their tensors. Nothing has been read."""

    a: Checkpoint
    b: Checkpoint
    owners_a: Mapping[str, str]
    """Each name, spelled as in B, and the name under which A stores its tensor."""
    owners_b: Mapping[str, str]
    """The same for B."""
    notes: tuple[str, ...]
    """What was done to make names meet, as sentences."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names: those of A in its order, then those that only B has."""
        return tuple({**self.owners_a, **self.owners_b})

    @property
    def pairs(self) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
        """The distinct pairs of stored tensors that share a name."""
        common = [name for name in self.owners_a if name in self.owners_b]
        owners = dict.fromkeys((self.owners_a[name], self.owners_b[name]) for name in common)
        return tuple((self.a.specs[owner_a], self.b.specs[owner_b]) for owner_a, owner_b in owners)

    @property
    def read_bytes(self) -> int:
        """Bytes that `compare` reads, of both sides together."""
        return sum(
            spec_a.size_bytes + spec_b.size_bytes
            for spec_a, spec_b in self.pairs
            if spec_a.shape == spec_b.shape
        )

    @property
    def tied_in_a(self) -> tuple[tuple[str, ...], ...]:
        """Names of both sides that are one tensor in A and several in B."""
        return tuple(_tied_in_one(self.owners_a, self.owners_b))

    @property
    def tied_in_b(self) -> tuple[tuple[str, ...], ...]:
        """Names of both sides that are one tensor in B and several in A."""
        return tuple(_tied_in_one(self.owners_b, self.owners_a))


def match(
    a: Checkpoint,
    b: Checkpoint,
    *,
    labels: tuple[str, str] = ("A", "B"),
    keep: Callable[[str], bool] = lambda _: True,
) -> Match:
    """Return which names mean which tensors. Reads nothing.

    An outermost `module.` that only one side has is looked past. A Hugging Face folder leaves out
    the further names of a shared tensor without saying so; there a name that the other side
    declares to be another name of a tensor that both have is taken for that tensor.

    Args:
        a: one checkpoint.
        b: the other.
        labels: what the notes call the two.
        keep: whether a name, spelled as in B, is wanted.
    """
    remove, add = reconcile_prefix(a, b)
    owners_a = {add + name.removeprefix(remove): a.owner(name) for name in a}
    owners_b = {name: b.owner(name) for name in b}
    implied_a = {} if records_ties(a) else _implied(owners_b, owners_a)
    implied_b = {} if records_ties(b) else _implied(owners_a, owners_b)
    notes = []
    if remove:
        notes.append(f"every name in {labels[0]} begins with {remove!r}, which was taken off")
    if add:
        notes.append(f"every name in {labels[1]} begins with {add!r}, which {labels[0]} lacks")
    for implied, here, there in ((implied_a, *labels), (implied_b, *reversed(labels))):
        names = [name for name in implied if keep(name)]
        if names:
            notes.append(
                f"{here} does not list {listed(names)}: in {there} other names of tensors that "
                "both have, which Hugging Face folders leave out"
            )
    return Match(
        a=a,
        b=b,
        owners_a={n: owner for n, owner in (owners_a | implied_a).items() if keep(n)},
        owners_b={n: owner for n, owner in (owners_b | implied_b).items() if keep(n)},
        notes=tuple(notes),
    )


def records_ties(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says which of its names are one tensor; Hugging Face folders do not."""
    is_bare = isinstance(checkpoint, Consolidated) and checkpoint.manifest is None
    return not is_bare or bool(checkpoint.aliases)


def _implied(saying: Mapping[str, str], silent: Mapping[str, str]) -> dict[str, str]:
    """Return names that one side ties to names of the other, which lacks them, with its owners."""
    known = {owner: silent[name] for name, owner in saying.items() if name in silent}
    return {
        name: known[owner]
        for name, owner in saying.items()
        if name not in silent and owner in known
    }


def _tied_in_one(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name, owner in one.items():
        if name in other:
            groups.setdefault(owner, []).append(name)
    for names in groups.values():
        if len({other[name] for name in names}) > 1:
            yield tuple(names)


# ------------------------------------------------------------------ comparing


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One name, and how what it means in A compares with what it means in B."""

    name: str
    """As B spells it, where one side has an outermost `module.` and the other has not."""
    outcome: Outcome
    """equal: shape, dtype and values. close: values that differ, all of them within a tolerance.
    differs: values that no tolerance accepts. dtype: another dtype, whatever the values. shape:
    another shape; values are not compared."""
    a: TensorSpec | None
    """The stored tensor in A, under the name that owns it; None where A has no such name."""
    b: TensorSpec | None
    """The same in B."""
    differing_numel: int | None = None
    """Elements that are not the same; None where values were not compared, here and below."""
    max_abs: float | None = None
    """Largest |a - b|, which is infinite where one is a NaN or they are different infinities."""
    max_rel: float | None = None
    """Largest |a - b|, relative to the larger of |a| and |b|."""

    @property
    def is_difference(self) -> bool:
        """Whether the two are neither equal nor close."""
        return self.outcome not in {"equal", "close"}


def compare(
    matched: Match,
    rule: Rule,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Row, ...]:
    """Compare what the names mean, each pair of stored tensors once, and return a row a name.

    **Memory:** a few MiB a thread.

    Args:
        matched: the names.
        rule: what counts as equal.
        jobs: threads; by default one a core.
        progress: called with (bytes read so far, bytes in all), of both sides together.

    Raises:
        CorruptCheckpointError: a file changed or turned out to be damaged while it was read.
    """
    gaps = _gaps(matched, rule, jobs, progress)
    return tuple(_row(matched, name, rule, gaps) for name in matched.names)


Gaps = dict[tuple[str, str], Gap]
"""By the names that own the two tensors."""


def _gaps(
    matched: Match,
    rule: Rule,
    jobs: int | None,
    progress: Callable[[int, int], None] | None,
) -> Gaps:
    def gap_of(part: tuple[TensorSpec, TensorSpec, Block]) -> Gap:
        spec_a, spec_b, block = part
        widest = max(spec_a.dtype.size_bytes, spec_b.dtype.size_bytes)
        return _sum(
            gap_between(
                matched.a.read(spec_a.name, start, end),
                matched.b.read(spec_b.name, start, end),
                rule,
            )
            for start, end in chunks(block.start, block.end, widest)
        )

    pairs = [(a, b) for a, b in matched.pairs if a.shape == b.shape]
    gaps = {(a.name, b.name): Gap() for a, b in pairs}
    parts = [(a, b, block) for a, b in pairs for block in blocks_of(a)]
    total, done = matched.read_bytes, 0
    with ThreadPoolExecutor(jobs or os.cpu_count()) as threads:
        for (a, b, block), gap in zip(parts, threads.map(gap_of, parts), strict=True):
            gaps[a.name, b.name] += gap
            done += (block.end - block.start) * (a.dtype.size_bytes + b.dtype.size_bytes)
            if progress is not None:
                progress(done, total)
    return gaps


def _row(matched: Match, name: str, rule: Rule, gaps: Gaps) -> Row:
    owner_a, owner_b = matched.owners_a.get(name), matched.owners_b.get(name)
    a = None if owner_a is None else matched.a.specs[owner_a]
    b = None if owner_b is None else matched.b.specs[owner_b]
    if a is None or b is None:
        return Row(name=name, outcome="only in B" if a is None else "only in A", a=a, b=b)
    gap = gaps.get((a.name, b.name))
    if gap is None:
        return Row(name=name, outcome="shape", a=a, b=b)
    return Row(
        name=name,
        outcome=_outcome(a, b, gap, rule),
        a=a,
        b=b,
        differing_numel=gap.differing_numel,
        max_abs=gap.max_abs,
        max_rel=gap.max_rel,
    )


def _outcome(a: TensorSpec, b: TensorSpec, gap: Gap, rule: Rule) -> Outcome:
    is_cast = rule.casts and a.dtype.is_floating and b.dtype.is_floating
    if a.dtype != b.dtype and not is_cast:
        return "dtype"
    if gap.beyond_numel:
        return "differs"
    return "close" if gap.differing_numel else "equal"
