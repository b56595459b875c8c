"""ZeRO arithmetic: where the elements of a full tensor lie in the flat groups of the ranks.

Pure numbers. Stages 1 and 2 put a group's parameters one behind the other and cut the whole into
one partition a rank. Stage 3 cuts each parameter into one fragment a rank and puts a rank's
fragments one behind the other, in sub-groups that may end in the middle of a fragment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a tensor that lie behind each other in one flat group of a rank."""

    rank: int
    group: int
    start: int
    """First element in the flat group."""
    numel: int


class Placement(Protocol):
    """Where a tensor's elements lie."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield elements `[start, end)` of the flattened tensor, in order, without holes."""
        ...


def fragment_numel(numel: int, ranks: int) -> int:
    """Return how many elements of a tensor each rank holds under stage 3, padding included.

    DeepSpeed: `partition_parameters.py`, `_aligned_size` over the number of partitions.
    """
    return -(-numel // ranks)


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return where each of several runs begins when they are put one behind the other, and the end.

    `starts_of([3, 2])` is `(0, 3, 5)`.
    """
    return tuple(accumulate(lengths, initial=0))


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor in one place."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the one piece; see `Placement`."""
        if start < end:
            yield Piece(0, 0, start, end - start)


@dataclass(frozen=True, slots=True)
class InPartitions:
    """A parameter in a flat group that is cut into one partition a rank (stages 1 and 2)."""

    group: int
    offset: int
    """Its first element in the whole flat group."""
    rank_starts: tuple[int, ...]
    """Where each rank's partition begins in the whole flat group, and the end; see `starts_of`."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces rank by rank; see `Placement`."""
        for rank, local, numel in _cut(self.rank_starts, self.offset + start, self.offset + end):
            yield Piece(rank, self.group, local, numel)


@dataclass(frozen=True, slots=True)
class InFragments:
    """A parameter of which every rank holds a fragment (stage 3)."""

    fragment_numel: int
    """See the function of this name."""
    offset: int
    """The fragment's first element in a rank's flat groups, one behind the other."""
    group_starts: tuple[int, ...]
    """Where each flat group of a rank begins, and the end; the same on every rank."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces rank by rank, and in a rank group by group; see `Placement`."""
        while start < end:
            rank, inside = divmod(start, self.fragment_numel)
            numel = min(self.fragment_numel - inside, end - start)
            first = self.offset + inside
            for group, local, count in _cut(self.group_starts, first, first + numel):
                yield Piece(rank, group, local, count)
            start += numel


def _cut(starts: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the run, first element in it, number of elements) for `[start, end)`."""
    index = bisect_right(starts, start) - 1
    while start < end:
        stop = min(end, starts[index + 1])
        if stop > start:
            yield index, start - starts[index], stop - start
            start = stop
        index += 1
