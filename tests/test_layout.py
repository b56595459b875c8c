"""Where elements lie, against flat groups that are built and cut with lists alone.

The rules here are DeepSpeed's, written down once more from its sources: `stage_1_and_2.py` flattens
a group and deals equal runs of it to the ranks; `partition_parameters.py` deals each parameter to
the ranks, and `stage3.py` puts a rank's parts one behind the other, group by group.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.layout import InFragments, InPartitions, Whole, fragment_numel, starts_of

PADDING = None


def labelled(sizes):
    """Parameters of these sizes; an element is the parameter's number and its own."""
    return [[(number, i) for i in range(size)] for number, size in enumerate(sizes)]


def chopped(flat, lengths):
    """A list cut into runs of these lengths."""
    items = iter(flat)
    found = [list(itertools.islice(items, length)) for length in lengths]
    assert next(items, "nothing") == "nothing"
    return found


def read(pieces, ranks):
    """What the pieces point at in `ranks[rank][group]`, and whether each is a run inside of it."""
    found = []
    for piece in pieces:
        group = ranks[piece.rank][piece.group]
        assert piece.numel > 0
        assert 0 <= piece.start <= piece.start + piece.numel <= len(group)
        found += group[piece.start : piece.start + piece.numel]
    return found


def ranges(draw, numel):
    start = draw.draw(st.integers(0, numel))
    return start, draw.draw(st.integers(start, numel))


# ------------------------------------------------------------------ stages 1 and 2


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(0, 7),
    st.booleans(),
    st.data(),
)
def test_partitions_hold_what_the_pieces_say(groups, ranks, padding, drops_padding, draw):
    """With gaps for alignment between parameters, and padding at the end that may be cut off."""
    held = [[] for _ in range(ranks)]
    offsets, parameters = {}, {}
    for number, sizes in enumerate(groups):
        flat = []
        for index, parameter in enumerate(labelled(sizes)):
            offsets[number, index] = len(flat)
            parameters[number, index] = parameter
            flat += parameter + [PADDING] * draw.draw(st.sampled_from([0, 0, 3]))
        used = len(flat)
        flat += [PADDING] * padding
        flat += [PADDING] * (-len(flat) % ranks)
        length = len(flat) // ranks
        for rank, partition in enumerate(chopped(flat, [length] * ranks)):
            kept = min(max(used - rank * length, 0), length) if drops_padding else length
            held[rank].append(partition[:kept])
    for (group, index), parameter in parameters.items():
        rank_starts = starts_of([len(rank[group]) for rank in held])
        placement = InPartitions(group, offsets[group, index], rank_starts)
        start, end = ranges(draw, len(parameter))
        pieces = list(placement.pieces(start, end))
        assert read(pieces, held) == parameter[start:end]
        assert [piece.rank for piece in pieces] == sorted({piece.rank for piece in pieces})
        assert all(piece.group == group for piece in pieces)


# ------------------------------------------------------------------ stage 3


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_fragments_hold_what_the_pieces_say(sizes, ranks, draw):
    """With sub-groups that end anywhere, in the middle of a fragment too."""
    parameters = labelled(sizes)
    flats = [[] for _ in range(ranks)]
    offsets = []
    for parameter in parameters:
        length = (len(parameter) + ranks - 1) // ranks
        padded = parameter + [PADDING] * (length * ranks - len(parameter))
        offsets.append(len(flats[0]))
        for rank, fragment in enumerate(chopped(padded, [length] * ranks)):
            flats[rank] += fragment
    total = len(flats[0])
    cuts = sorted(draw.draw(st.lists(st.integers(0, total), max_size=5)))
    lengths = [end - start for start, end in itertools.pairwise([0, *cuts, total])]
    held = [chopped(flat, lengths) for flat in flats]
    for parameter, offset in zip(parameters, offsets, strict=True):
        length = fragment_numel(len(parameter), ranks)
        placement = InFragments(length, offset, starts_of(lengths))
        start, end = ranges(draw, len(parameter))
        pieces = list(placement.pieces(start, end))
        assert read(pieces, held) == parameter[start:end]
        order = [(piece.rank, piece.group) for piece in pieces]
        assert order == sorted(set(order)), "each flat group once, in order"


@settings(max_examples=50)
@given(st.integers(0, 10**13), st.integers(1, 5000))
def test_a_fragment_is_the_least_that_holds_a_tensor_on_all_ranks(numel, ranks):
    fragment = fragment_numel(numel, ranks)
    assert fragment * ranks >= numel
    assert (fragment - 1) * ranks < numel or fragment == 0
    assert fragment >= 0


def test_sizes_beyond_floating_numbers_are_exact():
    numel, ranks = 2**60 + 1, 3
    placement = InFragments(fragment_numel(numel, ranks), 2**61, starts_of([2**61, 2**62]))
    (piece,) = placement.pieces(numel - 1, numel)
    fragment = 384_307_168_202_282_326  # (2**60 + 1) / 3, rounded up
    assert (piece.rank, piece.group, piece.numel) == (2, 1, 1)
    assert piece.start == numel - 1 - 2 * fragment


# ------------------------------------------------------------------ the rest


@given(st.lists(st.integers(0, 50), max_size=8))
def test_starts_are_where_runs_begin_in_the_whole(lengths):
    starts = starts_of(lengths)
    flat = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert len(starts) == len(lengths) + 1
    assert starts[-1] == len(flat)
    for number, length in enumerate(lengths):
        assert flat[starts[number] : starts[number + 1]] == [number] * length


def test_an_example_of_each():
    assert starts_of([3, 2]) == (0, 3, 5)
    assert starts_of([]) == (0,)
    assert [fragment_numel(numel, 4) for numel in (0, 1, 4, 5, 13, 15)] == [0, 1, 1, 2, 4, 4]

    def told(placement, start, end):
        return [(p.rank, p.group, p.start, p.numel) for p in placement.pieces(start, end)]

    assert told(Whole(), 2, 7) == [(0, 0, 2, 5)]
    # Three ranks have 4 elements each; the parameter begins at element 3.
    assert told(InPartitions(1, 3, (0, 4, 8, 12)), 0, 6) == [
        (0, 1, 3, 1),
        (1, 1, 0, 4),
        (2, 1, 0, 1),
    ]
    # Fragments of 4 elements at element 3; flat groups of 5 and 2 elements.
    assert told(InFragments(4, 3, (0, 5, 7)), 1, 6) == [(0, 0, 4, 1), (0, 1, 0, 2), (1, 0, 3, 2)]


@pytest.mark.parametrize(
    "placement",
    [Whole(), InPartitions(0, 2, (0, 4, 8)), InFragments(4, 2, (0, 4, 8))],
    ids=["whole", "partitions", "fragments"],
)
def test_an_empty_range_has_no_pieces(placement):
    for at in (0, 3, 4):
        assert list(placement.pieces(at, at)) == []
