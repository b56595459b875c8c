"""The plan: what it lays out is what the safetensors library and huggingface_hub would."""

import itertools
import json

import pytest
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from zckpt.errors import UsageError
from zckpt.plan import INDEX_NAME, deal, fill_buckets, lay_out_file, make_plan
from zckpt.spec import DTYPES, AliasGroup, TensorSpec

ONE_DTYPE_A_WIDTH = ("uint8", "bfloat16", "float32", "int64")
"""The library orders dtypes of one width among themselves; with one a width there is one order."""


prove = settings(deadline=None, max_examples=60)  # the first call of a library takes its time


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


names = st.text(
    st.characters(codec="utf-8", exclude_characters=["\0"]), min_size=1, max_size=8
).filter(lambda name: name not in {"__metadata__", "format"})
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def spec_lists(draw, dtypes=tuple(DTYPES), shapes=shapes, names=names, max_size=8):
    chosen = draw(st.lists(names, min_size=1, max_size=max_size, unique=True))
    return [
        TensorSpec(
            name=name,
            shape=draw(shapes),
            dtype=DTYPES[draw(st.sampled_from(dtypes))],
            role=draw(st.sampled_from(["parameter", "buffer"])),
        )
        for name in chosen
    ]


def random_tensor(spec, seed=0):
    """Random bits of any dtype; for bool only those that are a bool."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype.name == "bool" else 256
    data = torch.randint(0, high, (spec.size_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(getattr(torch, spec.dtype.name)).view(spec.shape)


def random_tensors(specs):
    return {spec.name: random_tensor(spec, seed) for seed, spec in enumerate(specs)}


def assemble(file, spans, tensors):
    """Return the file's bytes, put together from the plan alone."""
    data = bytearray(file.size_bytes)
    data[: len(file.header)] = file.header
    for name, span in spans.items():
        raw = bytes(tensors[name].reshape(-1).view(torch.uint8).tolist())
        assert span.size_bytes == len(raw)
        data[span.start : span.end] = raw
    return bytes(data)


def plan_of(specs, aliases=None, **options):
    groups = [AliasGroup(spec.name, tuple((aliases or {}).get(spec.name, ()))) for spec in specs]
    options = {
        "max_shard_size": "5GB",
        "bucket_bytes": 1 << 20,
        "window_bytes": {spec.name: spec.size_bytes for spec in specs},
        "writer_ranks": 1,
    } | options
    return make_plan(specs, groups, **options)


# ------------------------------------------------------------------ one file


@prove
@given(spec_lists())
def test_spans_cover_the_file_once_and_are_aligned(specs):
    file, spans = lay_out_file("f", specs, {})
    assert spans.keys() == {spec.name for spec in specs}
    position = len(file.header)
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        (spec,) = (s for s in specs if s.name == name)
        assert span.start == position
        assert span.start % spec.dtype.size_bytes == 0
        assert span.size_bytes == spec.size_bytes
        position = span.end
    assert position == file.size_bytes


@prove
@given(spec_lists())
def test_safetensors_reads_from_an_assembled_file_what_was_put_in(specs):
    tensors = random_tensors(specs)
    data = assemble(*lay_out_file("f", specs, {}), tensors)
    found = safetensors.torch.load(data)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in tensors.items()}


@prove
@given(spec_lists(dtypes=ONE_DTYPE_A_WIDTH))
def test_the_file_is_byte_for_byte_the_one_that_safetensors_writes(specs):
    tensors = random_tensors(specs)
    data = assemble(*lay_out_file("f", specs, {}), tensors)
    assert data == safetensors.torch.save(tensors, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_alone_is_written_as_safetensors_writes_it(dtype):
    specs = [
        TensorSpec(name=name, shape=shape, dtype=DTYPES[dtype], role="buffer")
        for name, shape in (("b", (3, 2)), ("a", ()), ("c", (0, 4)), ("B", (1,)))
    ]
    tensors = random_tensors(specs)
    data = assemble(*lay_out_file("f", specs, {}), tensors)
    assert data == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_the_metadata_maps_aliases_to_owners_as_save_model_writes_them(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3, bias=False)
            self.b = torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "theirs"))
    spec = TensorSpec(name="a.weight", shape=(3, 3), dtype=DTYPES["float32"], role="parameter")
    file, spans = lay_out_file("f", [spec], {"a.weight": ("b.weight",)})
    (tmp_path / "ours").write_bytes(assemble(file, spans, {"a.weight": model.a.weight.detach()}))
    with safe_open(tmp_path / "theirs", "pt") as theirs, safe_open(tmp_path / "ours", "pt") as ours:
        assert theirs.metadata() == {"b.weight": "a.weight"}
        assert ours.metadata() == {"format": "pt", **theirs.metadata()}  # transformers wants it
        assert list(ours.keys()) == list(theirs.keys())


# ------------------------------------------------------------------ several files


@prove
@given(
    spec_lists(
        dtypes=("float32", "bfloat16", "uint8"), shapes=st.tuples(st.integers(1, 40)), max_size=12
    ),
    st.integers(1, 300),
)
def test_files_are_those_of_huggingface_hub(specs, max_shard_size):
    tensors = random_tensors(specs)
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    ours = plan_of(specs, max_shard_size=max_shard_size)
    assert [file.name for file in ours.files] == list(theirs.filename_to_tensors)
    assert {n: t.file for n, t in ours.tensors.items()} == theirs.tensor_to_filename
    if theirs.is_sharded:
        assert json.loads(ours.index) == {
            "metadata": theirs.metadata,
            "weight_map": theirs.tensor_to_filename,
        }
    else:
        assert ours.index is None
        assert ours.files[0].name == "model.safetensors"


def test_sizes_in_words_are_decimal_as_huggingface_hub_reads_them():
    specs = [
        TensorSpec(name=n, shape=(1000,), dtype=DTYPES["uint8"], role="parameter") for n in "abc"
    ]
    for size in ("1KB", "2KB", "3KB", 2999, 3000, "1.5MB", "5GB"):
        theirs = split_torch_state_dict_into_shards(random_tensors(specs), max_shard_size=size)
        names = [file.name for file in plan_of(specs, max_shard_size=size).files]
        assert names == list(theirs.filename_to_tensors), size


@prove
@given(spec_lists(), st.integers(1, 200))
def test_every_file_of_a_plan_reads_back_whole(specs, max_shard_size):
    tensors = random_tensors(specs)
    plan = plan_of(specs, max_shard_size=max_shard_size)
    assert list(plan.tensors) == [spec.name for spec in specs]
    found = {}
    for file in plan.files:
        spans = {n: t.span for n, t in plan.tensors.items() if t.file == file.name}
        found |= safetensors.torch.load(assemble(file, spans, tensors))
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in tensors.items()}
    assert plan.size_bytes == sum(file.size_bytes for file in plan.files)


def test_the_index_is_what_transformers_reads(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    theirs = json.loads((tmp_path / INDEX_NAME).read_bytes())
    specs = [
        TensorSpec(name=n, shape=tuple(t.shape), dtype=DTYPES["float32"], role="parameter")
        for n, t in model.state_dict().items()
        if n != "lm_head.weight"
    ]
    ours = json.loads(plan_of(specs, max_shard_size="3KB").index)
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


# ------------------------------------------------------------------ buckets and writers


@prove
@given(st.dictionaries(st.text(max_size=4), st.integers(0, 100), max_size=20), st.integers(1, 150))
def test_buckets_keep_the_order_and_the_limit(window_bytes, bucket_bytes):
    buckets = list(fill_buckets(window_bytes, bucket_bytes))
    assert [name for bucket in buckets for name in bucket] == list(window_bytes)
    assert all(buckets)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(window_bytes[name] for name in bucket) <= bucket_bytes
    for one, following in itertools.pairwise(buckets):
        assert sum(window_bytes[n] for n in (*one, following[0])) > bucket_bytes


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_size_that_is_not_positive_is_refused(bucket_bytes):
    with pytest.raises(UsageError, match="bucket_bytes"):
        list(fill_buckets({"a": 1}, bucket_bytes))


large_specs = st.lists(
    st.tuples(st.integers(0, 40 << 20), st.sampled_from(["uint8", "bfloat16", "float64"])),
    min_size=1,
    max_size=8,
).map(lambda sizes: [spec(str(i), numel, dtype) for i, (numel, dtype) in enumerate(sizes)])


@prove
@given(large_specs, st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_element_is_dealt_once_and_evenly(specs, ranks, per_bucket, data):
    every = [s.name for s in specs]
    pinned = frozenset(data.draw(st.lists(st.sampled_from(every), unique=True)))
    buckets = [specs[i : i + per_bucket] for i in range(0, len(specs), per_bucket)]
    shares = deal(buckets, ranks, pinned)
    assert len(shares) == len(buckets)
    for bucket, by_rank in zip(buckets, shares, strict=True):
        assert len(by_rank) == ranks
        for s in bucket:
            ranges = sorted(
                (b.start, b.end) for share in by_rank for b in share if b.name == s.name
            )
            assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
            assert (ranges[0][0], ranges[-1][1]) == (0, s.numel) if s.numel else ranges == []
        assert {b.name for share in by_rank[1:] for b in share} & pinned == set()
        free = [[b.size_bytes for b in share if b.name not in pinned] for share in by_rank]
        total, largest = sum(map(sum, free)), max(map(max, filter(None, free)), default=0)
        assert all(abs(sum(share) - total / ranks) <= largest for share in free)


def test_a_large_tensor_is_shared_by_all_ranks():
    ((one, two, three),) = deal([[spec("a", 96 << 20, "uint8")]], 3)
    assert [len(share) for share in (one, two, three)] == [2, 2, 2]


def test_buckets_of_one_block_go_to_the_ranks_in_turn():
    shares = deal([[spec(name, 5, "float32")] for name in "abcdefg"], 3)
    ranks = [next(r for r, share in enumerate(by_rank) if share) for by_rank in shares]
    assert sorted(ranks[:3]) == [0, 1, 2]
    assert ranks[3:6] == ranks[:3]


@prove
@given(spec_lists(), st.integers(1, 4), st.integers(1, 100), st.integers(1, 300))
def test_the_same_specs_make_the_same_plan(specs, ranks, bucket_bytes, max_shard_size):
    options = {
        "writer_ranks": ranks,
        "bucket_bytes": bucket_bytes,
        "max_shard_size": max_shard_size,
    }
    one, other = plan_of(specs, **options), plan_of(list(specs), **options)
    assert one == other
    assert one.index == other.index
    assert {len(by_rank) for by_rank in one.shares} == {ranks}
    assert [name for bucket in one.buckets for name in bucket] == list(one.tensors)


# ------------------------------------------------------------------ main dtype, refusals


def spec(name, numel, dtype, role="parameter"):
    return TensorSpec(name=name, shape=(numel,), dtype=DTYPES[dtype], role=role)


def test_the_main_dtype_is_that_of_most_parameter_bytes():
    specs = [
        spec("a", 3, "bfloat16"),
        spec("b", 1, "float32"),
        spec("c", 99, "float64", "buffer"),
        spec("d", 99, "int64"),
    ]
    assert plan_of(specs).main_dtype is DTYPES["bfloat16"]
    assert plan_of(specs[1:]).main_dtype is DTYPES["float32"]
    assert plan_of(specs[2:]).main_dtype is None


def test_nothing_to_save_is_refused():
    with pytest.raises(UsageError, match="nothing to save"):
        plan_of([])


@pytest.mark.parametrize(
    "size", [0, -1, "-5GB", " -1KB", "", "abc", "5XB", "5", "GB", "0GB", "0.0MB"]
)
def test_a_file_size_that_makes_no_sense_is_refused(size):
    with pytest.raises(UsageError, match="max_shard_size"):
        plan_of([spec("a", 3, "float32"), spec("b", 3, "float32")], max_shard_size=size)
