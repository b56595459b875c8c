"""Reading a folder of safetensors: what is there comes back, what is damaged is refused by name."""

import contextlib
import json
import threading

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from torch import nn

import zckpt
from zckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    ZckptError,
)
from zckpt.manifest import MANIFEST_NAME
from zckpt.plan import INDEX_NAME
from zckpt.sources.consolidated import read_header

ONE = "model.safetensors"


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.detach().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    return {n: bits(t) for n, t in one.items()} == {n: bits(t) for n, t in other.items()}


class Odd(nn.Module):
    """Every kind of tensor that a state dict can have, and a tied pair."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.brain = nn.Parameter(torch.randn(3, 2, 5).bfloat16())
        self.register_buffer("count", torch.tensor([16777217, -1, 2**62]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("wave", torch.randn(2, 2, dtype=torch.complex64))


def tiny_gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes)))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A module and the zckpt folder that holds it, in several files."""
    model, folder = Odd(), tmp_path_factory.mktemp("odd") / "saved"
    zckpt.save_consolidated(model, folder, max_shard_size=100)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model, folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model and two folders that transformers wrote: of several files and of one."""
    model, place = tiny_gpt2(), tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(place / "many", max_shard_size="3KB")
    model.save_pretrained(place / "single")
    assert len(list((place / "many").glob("*.safetensors"))) > 2
    return model, place


# ------------------------------------------------------------------ what can be opened


def test_a_zckpt_folder_holds_the_state_dict(odd):
    model, folder = odd
    checkpoint = zckpt.open(folder)
    assert same(dict(checkpoint), model.state_dict())
    assert checkpoint.manifest is not None


@pytest.mark.parametrize("name", ["many", "single"])
def test_a_hugging_face_folder_holds_what_transformers_wrote(gpt2, name):
    model, place = gpt2
    checkpoint = zckpt.open(place / name)
    expected = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert same(dict(checkpoint), expected)
    assert checkpoint.manifest is None
    assert checkpoint.aliases == {}


def test_a_single_file_can_be_opened(gpt2):
    _, place = gpt2
    path = place / "single" / ONE
    assert same(dict(zckpt.open(path)), safetensors.torch.load_file(path))
    assert same(dict(zckpt.open(str(path))), safetensors.torch.load_file(path))


def test_aliases_in_the_metadata_of_save_model_are_read(tmp_path):
    model = Odd()
    safetensors.torch.save_model(model, str(tmp_path / ONE))
    assert same(dict(zckpt.open(tmp_path / ONE)), model.state_dict())


def test_a_tensor_called_pt_does_not_make_the_format_an_alias(tmp_path):
    """The metadata {"format": "pt"} says what wrote the file, whatever the tensors are called."""
    tensors = {"pt": torch.ones(2), "tf": torch.zeros(1)}
    safetensors.torch.save_file(tensors, tmp_path / ONE, metadata={"format": "pt"})
    assert sorted(zckpt.open(tmp_path / ONE)) == ["pt", "tf"]


def test_a_home_folder_is_expanded(odd, monkeypatch):
    _, folder = odd
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(zckpt.open("~/saved")) == len(zckpt.open(folder))


# ------------------------------------------------------------------ the mapping


def test_it_is_a_mapping_over_every_name(odd):
    model, folder = odd
    checkpoint = zckpt.open(folder)
    names = list(model.state_dict())
    assert sorted(checkpoint) == sorted(names)
    assert len(checkpoint) == len(names) == len(set(checkpoint))
    assert all(name in checkpoint for name in names)
    assert set(checkpoint.keys()) == set(names)
    assert checkpoint.get("nothing") is None


@pytest.mark.parametrize("call", ["__getitem__", "spec", "get_slice", "owner", "digest", "check"])
def test_an_unknown_name_is_a_key_error(odd, call):
    checkpoint = zckpt.open(odd[1])
    assert "nothing" not in checkpoint
    assert 3 not in checkpoint
    with pytest.raises(KeyError, match="nothing"):
        getattr(checkpoint, call)("nothing")
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.read("nothing", 0, 0)


def test_an_alias_is_its_owner_s_tensor(odd):
    checkpoint = zckpt.open(odd[1])
    assert checkpoint.aliases == {"head.weight": "embed.weight"}
    assert checkpoint.owner("head.weight") == checkpoint.owner("embed.weight") == "embed.weight"
    assert checkpoint.spec("head.weight") == checkpoint.spec("embed.weight")
    assert bits(checkpoint["head.weight"]) == bits(checkpoint["embed.weight"])
    assert checkpoint.digest("head.weight") == checkpoint.digest("embed.weight")
    checkpoint.check("head.weight")


def test_what_it_returns_is_the_caller_s_own(odd):
    checkpoint = zckpt.open(odd[1])
    checkpoint["brain"].zero_()
    assert bits(checkpoint["brain"]) == bits(odd[0].brain)


def test_a_strict_load_state_dict_takes_it(odd):
    model, folder = odd
    fresh = Odd()
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    result = fresh.load_state_dict(dict(zckpt.open(folder)), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert same(fresh.state_dict(), model.state_dict())


def test_specs_are_those_of_the_tensors(odd):
    model, folder = odd
    checkpoint = zckpt.open(folder)
    for name, tensor in model.state_dict().items():
        spec = checkpoint.spec(name)
        assert spec.shape == tuple(tensor.shape), name
        assert f"torch.{spec.dtype.name}" == str(tensor.dtype), name


def test_a_slice_is_torch_s(odd):
    model, folder = odd
    checkpoint = zckpt.open(folder)
    lazy = checkpoint.get_slice("brain")
    assert list(lazy.get_shape()) == [3, 2, 5]
    assert bits(lazy[1:]) == bits(model.brain[1:])
    assert bits(lazy[:, 1, 2:4]) == bits(model.brain[:, 1, 2:4])
    assert bits(checkpoint.get_slice("head.weight")[3:5]) == bits(model.embed.weight[3:5])


def test_it_can_be_read_from_several_threads(odd):
    model, folder = odd
    checkpoint = zckpt.open(folder)
    expected = {n: bits(t) for n, t in model.state_dict().items()}
    wrong = []

    def read_all():
        wrong.extend(n for _ in range(5) for n in checkpoint if bits(checkpoint[n]) != expected[n])

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_its_repr_says_what_it_is(odd, gpt2):
    assert "zckpt checkpoint" in repr(zckpt.open(odd[1]))
    assert "1 aliases" in repr(zckpt.open(odd[1]))
    assert "zckpt" not in repr(zckpt.open(gpt2[1] / "single")).partition(" ")[0]


# ------------------------------------------------------------------ ranges


@settings(deadline=None)
@given(st.data())
def test_a_range_is_that_of_the_flattened_tensor(odd, data):
    model, folder = odd
    name, tensor = data.draw(st.sampled_from(list(model.state_dict().items())))
    start = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(start, tensor.numel()))
    found = zckpt.open(folder).read(name, start, end)
    assert bits(found) == bits(tensor.flatten()[start:end])


@pytest.mark.parametrize("start, end", [(-1, 2), (2, 1), (0, 31), (31, 31)])
def test_a_range_outside_the_tensor_is_refused(odd, start, end):
    with pytest.raises(IndexError, match="brain has 30 elements"):
        zckpt.open(odd[1]).read("brain", start, end)


# ------------------------------------------------------------------ digests


def test_a_flipped_bit_is_found_by_name(odd, tmp_path):
    model, _ = odd
    zckpt.save_consolidated(model, tmp_path / "saved")
    checkpoint = zckpt.open(tmp_path / "saved")
    span = checkpoint.stored["brain"].span
    data = bytearray((tmp_path / "saved" / ONE).read_bytes())
    data[span.end - 1] ^= 1
    (tmp_path / "saved" / ONE).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="brain") as caught:
        checkpoint.check("brain")
    assert ONE in str(caught.value)
    for name in set(checkpoint) - {"brain"}:
        checkpoint.check(name)


def test_without_a_manifest_there_is_nothing_to_check_against(gpt2):
    checkpoint = zckpt.open(gpt2[1] / "single")
    assert checkpoint.records == {}
    for name in checkpoint:
        checkpoint.check(name)


def test_a_tensor_that_the_manifest_does_not_name_is_not_trusted(odd, tmp_path):
    zckpt.save_consolidated(nn.Linear(2, 2), tmp_path / "saved")
    path = tmp_path / "saved" / ONE
    tensors = safetensors.torch.load_file(path) | {"new": torch.ones(1)}
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CorruptCheckpointError, match="new is not in the manifest"):
        zckpt.open(tmp_path / "saved").check("new")


# ------------------------------------------------------------------ damaged files


def tiny_file():
    return safetensors.torch.save(
        {"a": torch.arange(3, dtype=torch.int16), "b": torch.ones(2, 1)}, metadata={"format": "pt"}
    )


def with_header(text, data):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


DAMAGED = {
    "overlapping spans": with_header({"a": entry(), "b": entry(start=4, end=12)}, bytes(12)),
    "one span twice": with_header({"a": entry(), "b": entry()}, bytes(8)),
    "a hole between": with_header({"a": entry(), "b": entry(start=12, end=20)}, bytes(20)),
    "a hole at the beginning": with_header({"a": entry(start=4, end=12)}, bytes(12)),
    "unknown dtype": with_header({"a": entry("F7")}, bytes(8)),
    "a dtype that is no text": with_header({"a": entry(["F32"])}, bytes(8)),
    "negative shape": with_header({"a": entry(shape=(-2,))}, bytes(8)),
    "two negatives": with_header({"a": entry(shape=(-1, -2))}, bytes(8)),
    "fractional shape": with_header({"a": entry(shape=(2.0,))}, bytes(8)),
    "a shape that is no list": with_header({"a": entry() | {"shape": 2}}, bytes(8)),
    "a shape that does not fit": with_header({"a": entry(shape=(3,))}, bytes(8)),
    "backward span": with_header({"a": entry(shape=(0,), start=8, end=0)}, bytes(8)),
    "negative offset": with_header({"a": entry(start=-8, end=0)}, bytes(8)),
    "three offsets": with_header({"a": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)),
    "no offsets": with_header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an entry that is no map": with_header({"a": 1}, bytes(8)),
    "a list": with_header([], b""),
    "null": with_header(b"null", b""),
    "no JSON": with_header(b"{", b""),
    "no UTF-8": with_header(b'{"\xff": 1}', b""),
    "huge header length": (2**63).to_bytes(8, "little") + bytes(100),
    "largest header length": b"\xff" * 8 + bytes(100),
    "header longer than the file": (101).to_bytes(8, "little") + bytes(100),
    "metadata that is a number": with_header({"__metadata__": 5, "a": entry()}, bytes(8)),
    "metadata that is a list": with_header({"__metadata__": ["x"], "a": entry()}, bytes(8)),
    "metadata that holds a list": with_header(
        {"__metadata__": {"x": ["a"]}, "a": entry()}, bytes(8)
    ),
    "a shape beyond any tensor": with_header({"a": entry(shape=(2**70, 0), start=0, end=0)}, b""),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_by_name(tmp_path, data):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(data)
    with pytest.raises(SafetensorError), safe_open(path, "pt"):  # the library agrees
        pass
    with pytest.raises(CorruptCheckpointError, match=r"damaged\.safetensors"):
        zckpt.open(path)


def test_every_cut_of_a_file_is_refused(tmp_path):
    data = tiny_file()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(data)
    assert len(zckpt.open(path)) == 2
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"cut\.safetensors"):
            zckpt.open(path)


@pytest.mark.parametrize("more", [1, 8, 4096])
def test_appended_bytes_are_refused(tmp_path, more):
    path = tmp_path / "longer.safetensors"
    path.write_bytes(tiny_file() + bytes(more))
    with pytest.raises(CorruptCheckpointError, match=r"longer\.safetensors.*appended to"):
        zckpt.open(path)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    path = tmp_path / "shrinking.safetensors"
    path.write_bytes(tiny_file())
    checkpoint = zckpt.open(path)
    path.write_bytes(tiny_file()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"shrinking\.safetensors"):
        dict(checkpoint)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_flipped_byte_in_the_header_is_refused_or_reads_as_valid_tensors(tmp_path_factory, data):
    content = bytearray(tiny_file())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header_bytes - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(content)
    refusal = None
    try:
        tensors = dict(zckpt.open(path))
    except ZckptError as error:
        refusal = str(error)
    if refusal is not None:
        assert "flipped.safetensors" in refusal
        return
    assert (
        sum(t.numel() * t.element_size() for t in tensors.values()) == len(content) - header_bytes
    )
    library = safetensors.torch.load(bytes(content))
    assert same(tensors, library)


def test_a_header_reads_as_the_bytes_before_the_tensors(tmp_path):
    path = tmp_path / ONE
    path.write_bytes(tiny_file())
    file = read_header(path)
    assert tiny_file().startswith(file.header)
    assert len(tiny_file()) - len(file.header) == 2 * 4 + 3 * 2
    assert file.aliases == {}


# ------------------------------------------------------------------ damaged folders


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_bytes())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.fixture
def many(tmp_path):
    """A fresh folder of two files with an index."""
    folder = tmp_path / "many"
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")
    names = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    index = {"metadata": {"total_size": 16}, "weight_map": names}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert set(zckpt.open(folder)) == {"a", "b"}
    return folder


def test_a_file_that_the_index_names_and_is_absent_is_named(many):
    (many / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model-00002-of-00002\.safetensors"):
        zckpt.open(many)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "x\0y"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(many, name):
    (many.parent / "x.safetensors").write_bytes(tiny_file())
    (many / "a").mkdir()
    (many / "a" / "b.safetensors").write_bytes(tiny_file())
    rewrite_index(many, lambda names: names.update(a=name))
    with pytest.raises(CorruptCheckpointError, match="many"):
        zckpt.open(many)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": ["model-00001-of-00002.safetensors"]}}',
        b'\xff\xfe{"weight_map": {}}',
    ],
)
def test_a_garbled_index_is_refused_by_name(many, text):
    (many / INDEX_NAME).write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=INDEX_NAME):
        zckpt.open(many)


def test_an_index_that_contradicts_the_headers_is_refused(many):
    rewrite_index(many, lambda names: names.update(c="model-00001-of-00002.safetensors"))
    with pytest.raises(CorruptCheckpointError, match=r"\bc\b"):
        zckpt.open(many)


def test_a_name_in_two_files_is_not_taken_from_the_wrong_one(many):
    """Either refused, or read from the file that the index gives for it, as transformers does."""
    tensors = {"a": torch.full((2,), 9.0), "b": torch.zeros(2)}
    safetensors.torch.save_file(tensors, many / "model-00002-of-00002.safetensors")
    with contextlib.suppress(CorruptCheckpointError):
        assert torch.equal(zckpt.open(many)["a"], torch.ones(2))


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b'{"schema_version": 1}', b"\xff"])
def test_a_garbled_manifest_is_refused_by_name(many, text):
    (many / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(ManifestError, match=MANIFEST_NAME):
        zckpt.open(many)


def test_a_missing_file_of_a_zckpt_folder_is_named(tmp_path):
    zckpt.save_consolidated(nn.Linear(2, 2), tmp_path / "saved")
    (tmp_path / "saved" / ONE).unlink()
    with pytest.raises(CorruptCheckpointError, match=ONE):
        zckpt.open(tmp_path / "saved")


def test_an_alias_whose_owner_is_not_stored_is_named(tmp_path):
    zckpt.save_consolidated(Odd(), tmp_path / "saved")
    path = tmp_path / "saved" / ONE
    tensors = safetensors.torch.load_file(path)
    del tensors["embed.weight"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CorruptCheckpointError, match=r"embed\.weight"):
        zckpt.open(tmp_path / "saved")


# ------------------------------------------------------------------ what is no checkpoint


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotACheckpointError, match="nowhere"):
        zckpt.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        zckpt.open(tmp_path / "nowhere")


def test_an_empty_folder_says_what_was_expected(tmp_path):
    with pytest.raises(NotACheckpointError) as caught:
        zckpt.open(tmp_path)
    for name in (str(tmp_path), MANIFEST_NAME, INDEX_NAME, ONE):
        assert name in str(caught.value)


def test_a_folder_of_pickled_weights_is_recognized(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(NotACheckpointError, match="pickled weights"):
        zckpt.open(tmp_path)


def test_the_folder_above_checkpoints_points_into_it(tmp_path):
    for step in (1, 2):
        zckpt.save_consolidated(nn.Linear(2, 2), tmp_path / f"checkpoint-{step}")
    with pytest.raises(NotACheckpointError, match="checkpoint-2"):
        zckpt.open(tmp_path)


def test_a_checkpoint_that_a_dead_save_moved_away_is_pointed_at(tmp_path):
    zckpt.save_consolidated(nn.Linear(2, 2), tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.zckpt-old-0123456789ab")
    with pytest.raises(NotACheckpointError, match=r"\.saved\.zckpt-old-0123456789ab"):
        zckpt.open(tmp_path / "saved")
