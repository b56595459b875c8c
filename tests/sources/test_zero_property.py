"""Any layout that DeepSpeed can write is read back as it was.

The generator that writes them knows nothing of the reader; its folders are compared with
DeepSpeed's in `tests/testing/test_zero_folders.py`. All padding is NaN, which no value here is.
"""

import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zckpt
from zckpt.testing.zero_folders import write_zero_folder

NAN = float("nan")
LIVE = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple) | st.sampled_from(
    [(0,), (0, 3), (2, 0), (13,), (37,)]
)
BUFFERS = st.sampled_from(
    [
        torch.tensor([16777217, -1, 2**62]),
        torch.tensor([True, False]),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor([1 + 2j], dtype=torch.complex64),
        torch.tensor(7),
        torch.empty(0, 2, dtype=torch.int16),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    ]
)


def bits(tensor):
    values = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1)
    return tensor.dtype, tuple(tensor.shape), values.view(torch.uint8).tolist()


def assert_same(found, expected):
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}


@st.composite
def models(draw, *, stages=(1, 2, 3)):
    """Arguments of `write_zero_folder`, and what has to be read from what it writes."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    stage = draw(st.sampled_from(stages))
    live = draw(LIVE)

    def parameters(kind, *, most):
        shapes = draw(st.lists(SHAPES, max_size=most))
        return {
            f"{kind}.{number}": torch.randn(shape, generator=generator)
            for number, shape in enumerate(shapes)
        }

    groups = [parameters(f"group{n}", most=5) for n in range(draw(st.integers(1, 3)))]
    if not any(t.numel() for group in groups for t in group.values()):
        groups[0]["group0.last"] = torch.randn(3, generator=generator)
    frozen = {n: t.to(live) for n, t in parameters("frozen", most=4).items()}
    unowned = {n: t.to(live) for n, t in parameters("unowned", most=2).items()}
    drawn = draw(st.lists(BUFFERS, max_size=4))
    buffers = {f"buffer.{number}": tensor.clone() for number, tensor in enumerate(drawn)}
    owned = {n: t for group in groups for n, t in group.items()}
    tensors = {**owned, **frozen, **unowned}
    can_be_tied = [n for n, t in tensors.items() if t.numel() and n not in unowned]
    tied = draw(st.lists(st.sampled_from(can_be_tied), max_size=3)) if can_be_tied else []
    aliases = {f"alias.{number}": name for number, name in enumerate(tied)}
    is_partitioned = stage == 3
    # Stage 3 has no storage that would show what shared_params leaves out.
    unlisted = draw(st.integers(0, len(aliases))) if not is_partitioned else 0
    names = draw(st.permutations([*tensors, *buffers, *aliases]))
    arguments = {
        "stage": stage,
        "world_size": draw(st.integers(1, 5)),
        "groups": groups,
        "frozen": frozen,
        "unowned": unowned,
        "buffers": buffers,
        "aliases": dict(list(aliases.items())[unlisted:]),
        "unlisted_aliases": dict(list(aliases.items())[:unlisted]),
        "names": names,
        "live_dtype": live,
        "moments": draw(st.booleans()),
        "padding": NAN,
        "global_steps": draw(st.integers(0, 5)),
    }
    if is_partitioned:
        arguments["sub_group_size"] = draw(st.none() | st.integers(1, 40))
    else:
        arguments["alignment"] = draw(st.sampled_from([1, 2, 4]))
        arguments["bf16_optimizer"] = stage == 1 and draw(st.booleans())
        if not arguments["bf16_optimizer"]:
            arguments["round_robin"] = draw(st.booleans())
            arguments["aligns_parameters"] = draw(st.booleans())
    # Where there is nothing to train, a parameter without elements is saved as a frozen one.
    expected = {n: t if t.numel() else t.to(live) for n, t in owned.items()}
    lost = {n for n in unowned if is_partitioned}
    expected |= frozen | {n: t for n, t in unowned.items() if n not in lost} | buffers
    expected |= {alias: expected[name] for alias, name in aliases.items()}
    return arguments, expected, aliases, lost


def written(tmp_path_factory, arguments):
    root = tmp_path_factory.getbasetemp() / "any"
    shutil.rmtree(root, ignore_errors=True)
    write_zero_folder(root, **arguments)
    return root


def ties(opened):
    groups = {}
    for alias, owner in opened.aliases.items():
        groups.setdefault(owner, {owner}).add(alias)
    return {frozenset(group) for group in groups.values()}


def expected_ties(aliases):
    groups = {}
    for alias, owner in aliases.items():
        groups.setdefault(owner, {owner}).add(alias)
    return {frozenset(group) for group in groups.values()}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(models())
def test_what_was_written_is_read(tmp_path_factory, model):
    arguments, expected, aliases, lost = model
    opened = zckpt.open(written(tmp_path_factory, arguments))
    assert_same(opened, expected)
    assert ties(opened) == expected_ties(aliases)
    assert set(opened.missing) == lost
    assert opened.global_step == arguments["global_steps"]
    first = {}
    for name in arguments["names"]:
        first.setdefault(aliases.get(name, name), name)
    assert list(opened.specs) == [name for name in first.values() if name not in lost]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(models(), st.data())
def test_any_range_is_that_of_the_whole(tmp_path_factory, model, data):
    arguments, expected, _, _ = model
    opened = zckpt.open(written(tmp_path_factory, arguments))
    for name, tensor in expected.items():
        start = data.draw(st.integers(0, tensor.numel()))
        end = data.draw(st.integers(start, tensor.numel()))
        assert bits(opened.read(name, start, end)) == bits(tensor.reshape(-1)[start:end])


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    models(),
    st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 3),
    st.sampled_from(["5GB", 600]),
)
def test_what_was_written_is_converted(tmp_path_factory, model, dtype, jobs, max_shard_size):
    arguments, expected, aliases, lost = model
    root = written(tmp_path_factory, arguments)
    words = {None: "keep", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    report = zckpt.convert(
        root,
        root / "out",
        dtype=words[dtype],
        jobs=jobs,
        max_shard_size=max_shard_size,
        allow_missing=sorted(lost),
    )
    if dtype is not None:
        is_cast = {n: not n.startswith("buffer") for n in expected}
        expected = {n: t.to(dtype) if is_cast[n] else t for n, t in expected.items()}
    opened = zckpt.open(root / "out")
    assert_same(opened, expected)
    assert ties(opened) == expected_ties(aliases)
    assert {left.name for left in report.left_out} == lost
    assert zckpt.verify(root / "out").is_fine


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_without_zero_the_masters_are_those_of_one_group(tmp_path_factory, data):
    """With several groups nothing tells which master is whose: the module's own values are read."""
    arguments, _, _, _ = data.draw(models(stages=(0,)))
    names = list(dict.fromkeys(n for group in arguments["groups"] for n in group))
    groups = [{n: t for group in arguments["groups"] for n, t in group.items() if t.numel()}]
    arguments |= {"groups": groups, "frozen": {}, "unowned": {}, "aliases": {}}
    arguments |= {"unlisted_aliases": {}, "alignment": 2, "bf16_optimizer": False}
    arguments["names"] = [*(n for n in names if n in groups[0]), *arguments["buffers"]]
    arguments |= {"round_robin": False, "aligns_parameters": False}
    opened = zckpt.open(written(tmp_path_factory, arguments))
    assert_same(opened, groups[0] | arguments["buffers"])
    if len(groups[0]) > 1:
        middle = len(groups[0]) // 2
        items = list(groups[0].items())
        arguments["groups"] = [dict(items[middle:]), dict(items[:middle])]
        opened = zckpt.open(written(tmp_path_factory, arguments))
        live = {n: t.to(arguments["live_dtype"]) for n, t in items}
        assert_same(opened, live | arguments["buffers"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equal_values_under_two_names_are_two_tensors(stage, tmp_path):
    group = {"a": torch.ones(3), "b": torch.ones(3)}
    write_zero_folder(tmp_path, stage=stage, world_size=2, groups=[group])
    opened = zckpt.open(tmp_path)
    assert opened.aliases == {}
    assert_same(opened, group)
