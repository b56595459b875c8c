"""How far two tensors are apart: by hand-made values, and by numpy's wider types."""

import numpy as np
import pytest
import torch

from zckpt.comparison import Gap, Rule, gap_between
from zckpt.spec import DTYPES

NAN, INF = float("nan"), float("inf")
BITWISE = Rule()
LARGE = (1 << 18) + 3
"""More than one piece of what is measured, and not a multiple."""


def gap(a, b, rule=BITWISE):
    return gap_between(a, b, rule)


def numbers(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_can_be_told_apart_and_found_equal(name):
    dtype = getattr(torch, name)
    a = numbers(1, 0, 1, 1).to(dtype)
    b = numbers(1, 1, 0, 1).to(dtype)
    assert gap(a, a.clone()) == Gap()
    assert gap(a, b) == Gap(differing_numel=2, beyond_numel=2, max_abs=1.0, max_rel=1.0)


def test_distances_are_those_of_numpy():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(LARGE, generator=generator)
    b = a * (1 + 1e-4 * torch.randn(LARGE, generator=generator))
    b[:1000] = a[:1000]
    x, y = a.numpy().astype(np.longdouble), b.numpy().astype(np.longdouble)
    distance = np.abs(x - y)
    found = gap(a, b)
    assert found.differing_numel == found.beyond_numel == int((x != y).sum())
    assert found.max_abs == pytest.approx(float(distance.max()), rel=1e-15)
    relative = distance / np.maximum(np.abs(x), np.abs(y))
    assert found.max_rel == pytest.approx(float(relative.max()), rel=1e-15)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (0.0, -0.0, (1, 0.0, 0.0)),
        (NAN, NAN, (0, 0.0, 0.0)),
        (NAN, 1.0, (1, INF, INF)),
        (1.0, NAN, (1, INF, INF)),
        (NAN, INF, (1, INF, INF)),
        (INF, INF, (0, 0.0, 0.0)),
        (INF, -INF, (1, INF, INF)),
        (1.0, INF, (1, INF, INF)),
        (-1.0, 1.0, (1, 2.0, 2.0)),
        (0.0, 1e-45, (1, 2.0**-149, 1.0)),  # the smallest of float32
    ],
)
def test_what_is_no_ordinary_number(a, b, expected):
    found = gap(numbers(7.0, a), numbers(7.0, b))
    assert (found.differing_numel, found.max_abs, found.max_rel) == expected
    assert found == gap(numbers(7.0, b), numbers(7.0, a))


def test_another_nan_differs_by_nothing():
    a, b = (torch.tensor([bits], dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001))
    a, b = a.view(torch.float32), b.view(torch.float32)
    assert gap(a, b) == Gap(differing_numel=1, beyond_numel=1)
    assert gap(a, b, Rule(atol=1e-30)).beyond_numel == 0


@pytest.mark.parametrize(
    "dtype, a, b, distance",
    [
        (torch.int64, 2**53, 2**53 + 1, 1),
        (torch.int64, 2**63 - 1, -(2**63), 2**64 - 1),
        (torch.int64, -1, 0, 1),
        (torch.uint64, 2**64 - 1, 0, 2**64 - 1),
        (torch.uint64, 2**64 - 1, 2**64 - 2, 1),
        (torch.uint8, 0, 255, 255),
    ],
)
def test_integers_are_subtracted_as_integers(dtype, a, b, distance):
    found = gap(numbers(a, dtype=dtype), numbers(b, dtype=dtype))
    assert found.max_abs == float(distance)
    assert found.max_rel == pytest.approx(distance / max(abs(a), abs(b)))


def test_complex_numbers_lie_in_a_plane():
    found = gap(numbers(3 + 4j, dtype=torch.complex64), numbers(0j, dtype=torch.complex64))
    assert (found.max_abs, found.max_rel) == (5.0, 1.0)
    found = gap(numbers(complex(NAN, 0), dtype=torch.complex64), numbers(0j, dtype=torch.complex64))
    assert found.max_abs == INF


@pytest.mark.parametrize(
    "rule, beyond",
    [
        (Rule(atol=0.25), 1),
        (Rule(atol=0.24), 3),
        (Rule(rtol=0.2), 1),
        (Rule(rtol=0.1), 2),
        (Rule(rtol=0.5), 0),
        (Rule(rtol=0.01, atol=0.25), 0),
        (Rule(rtol=0.009, atol=0.25), 1),
    ],
)
def test_an_element_is_accepted_within_either_tolerance(rule, beyond):
    """Absolute differences of 0.25, 1, 0.25, 0; relative ones of 0.2, 0.0099, 0.5, 0."""
    a, b = numbers(1.0, 100.0, 0.5, 5.0), numbers(1.25, 101.0, 0.25, 5.0)
    assert gap(a, b, rule).beyond_numel == beyond
    assert gap(a, b, rule).differing_numel == 3


def test_across_dtypes_values_count_and_not_bits():
    wide = numbers(1.0, -0.0, NAN, INF, 1.0009765625)
    narrow = numbers(1.0, 0.0, NAN, INF, 1.0, dtype=torch.bfloat16)
    found = gap(wide, narrow)
    assert (found.differing_numel, found.max_abs) == (1, 2.0**-10)
    assert gap(numbers(1, 0, dtype=torch.int32), numbers(1, 0, dtype=torch.bool)) == Gap()
    assert gap(numbers(7, dtype=torch.int64), numbers(7.5)).max_abs == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cast_rounds_once_and_leaves_nan_to_the_processor(dtype):
    master = torch.randn(1001, generator=torch.Generator().manual_seed(5))
    master[:40] = NAN
    master[40], master[41] = -0.0, 0.0
    saved = master.to(dtype)
    saved.view(torch.uint8)[saved.itemsize * 8 - 1] ^= 0x80  # another NaN: the sign of the eighth
    rule = Rule(casts=True)
    assert gap(master.to(dtype), saved, rule).differing_numel == 1
    assert gap(master, saved, rule) == Gap()
    flipped = saved.clone()
    flipped.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)[500] ^= 1
    assert gap(master, flipped, rule).differing_numel == 1
    signed = saved.clone()
    signed[40] = 0.0
    assert gap(master, signed, rule).differing_numel == 1
    number = saved.clone()
    number[3] = 1.0
    assert gap(master, number, rule).max_abs == INF


def test_a_cast_does_not_touch_what_is_compared():
    master, saved = numbers(NAN, 1.0), numbers(NAN, 2.0, dtype=torch.bfloat16)
    before = saved.view(torch.int16).clone()
    gap(master, saved, Rule(casts=True))
    assert torch.equal(saved.view(torch.int16), before)
    assert torch.equal(master[1:], numbers(1.0))


def test_integers_are_never_cast():
    found = gap(numbers(1.5), numbers(1, dtype=torch.int32), Rule(casts=True))
    assert found.max_abs == 0.5
