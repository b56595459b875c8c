"""Faults that were found by attacking the package; each stands for its kind."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zckpt
from zckpt import errors
from zckpt.writers import commit


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------ one string where several can be


@pytest.mark.parametrize("option", ["allow_missing", "allow_unexpected"])
def test_a_string_is_one_pattern_and_not_its_letters(option, out):
    small, large = Small(), Small()
    large.c = nn.Linear(2, 2)
    saved, target = (small, large) if option == "allow_missing" else (large, small)
    zckpt.save_consolidated(saved, out)
    with pytest.raises(errors.SpecMismatchError, match=r"c\.weight"):
        zckpt.load_consolidated(target, out, **{option: "d.*"})
    report = zckpt.load_consolidated(target, out, **{option: "c.*"})
    assert report.missing + report.unexpected == ("c.weight", "c.bias")


@pytest.mark.parametrize("how", ["text", "path", "home"])
def test_one_pinned_checkpoint_is_kept(how, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    first = tmp_path / "checkpoint-1"
    pinned = {"text": str(first), "path": first, "home": "~/checkpoint-1"}[how]
    for step in (1, 2, 3):
        zckpt.save_consolidated(
            Small(), tmp_path / f"checkpoint-{step}", save_total_limit=1, pinned=pinned
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


# ------------------------------------------------------------------ what a death left behind


def test_an_old_checkpoint_is_not_deleted_for_something_that_is_no_successor(out):
    zckpt.save_consolidated(Small(), out)
    waiting = out.with_name(".out.zckpt-old-abc")
    out.rename(waiting)
    out.mkdir()
    (out / "trainer_state.json").write_text("{}")  # a trainer went on
    with pytest.raises(errors.TargetExistsError):
        zckpt.save_consolidated(Small(), out, overwrite=True)
    assert zckpt.verify(waiting).is_fine


def test_of_several_old_checkpoints_the_newest_comes_back(out):
    for age, name in ((20, "aaa"), (10, "zzz"), (30, "mmm")):
        folder = out.with_name(f".out.zckpt-old-{name}")
        zckpt.save_consolidated(Small(), folder)
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    commit.recover(out)
    assert out.stat().st_mtime == 1_000_000 - 10
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    zckpt.save_consolidated(Small(), tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for path in ("", ".", "..", tmp_path):
        with pytest.raises(errors.UsageError, match="working directory"):
            zckpt.save_consolidated(Small(), path, overwrite=True)


# ------------------------------------------------------------------ odd tensors


def test_a_conjugate_view_is_no_alias_of_what_it_views(out):
    module = nn.Module()
    a = torch.tensor([1 + 2j, 3 - 1j])
    module.register_buffer("a", a)
    module.register_buffer("b", a.conj())
    zckpt.save_consolidated(module, out)
    checkpoint = zckpt.open(out)
    assert torch.equal(checkpoint["a"], a)
    assert torch.equal(checkpoint["b"], a.conj().resolve_conj())


def test_buffers_that_are_not_stored_need_not_be_storable(out):
    module = Small()
    module.register_buffer("wide", torch.ones(2, dtype=torch.complex128), persistent=False)
    module.register_buffer("meta", torch.ones(2, device="meta"), persistent=False)
    module.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    report = zckpt.save_consolidated(module, out)
    assert {b.name: b.digest for b in report.manifest.unstored_buffers} == {
        "wide": None,
        "meta": None,
        "sparse": None,
    }
    assert zckpt.load_consolidated(module, out).differing_buffers == ()
    assert zckpt.verify(out).is_fine


def test_an_expanded_buffer_survives_an_evaluation(out):
    module = Small()
    module.register_buffer("wide", torch.arange(3).unsqueeze(1).expand(3, 4))
    zckpt.save_consolidated(module, out, eval_fn=lambda m: float(m.wide.sum()))
    assert zckpt.open(out).manifest.evaluation.mean.value == 12.0


def test_an_evaluation_that_changes_weights_is_an_error(out):
    module = Small()
    with pytest.raises(errors.UsageError, match=r"eval_fn changed parameters: a\.bias"):
        zckpt.save_consolidated(module, out, eval_fn=lambda m: float(m.a.bias.fill_(1.0).sum()))
    assert not out.exists()


def test_values_that_do_not_fit_into_fp16_are_named(out):
    module = Small()
    with torch.no_grad():
        module.b.bias[0] = 1e6
    warnings = zckpt.save_consolidated(module, out, dtype="fp16").warnings
    assert warnings == ("values became infinite in fp16: b.bias.",)


def test_a_reserved_name_is_refused(out):
    module = nn.Module()
    module.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    with pytest.raises(errors.UsageError, match="__metadata__"):
        zckpt.save_consolidated(module, out)


# ------------------------------------------------------------------ folders


def test_of_a_single_file_and_a_stale_index_the_file_counts_as_for_transformers(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "old.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"w": "old.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert zckpt.open(tmp_path)["w"].tolist() == [1.0, 1.0]


def header_file(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}' + b"\0",
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16"),
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    ],
    ids=["nested", "boolean", "utf-16", "surrogate"],
)
def test_headers_that_safetensors_refuses_are_refused(text, tmp_path):
    header_file(tmp_path / "model.safetensors", text)
    with pytest.raises(errors.CorruptCheckpointError, match=r"model\.safetensors"):
        zckpt.open(tmp_path)


@pytest.mark.parametrize("path", ["x" * 300, "~nosuchuser/x", "a\0b"])
def test_paths_that_are_none_are_told_so(path):
    for verb in (zckpt.open, zckpt.verify):
        with pytest.raises(errors.NotACheckpointError):
            verb(path)


def edited(out, edit):
    zckpt.save_consolidated(Small(), out, eval_fn=lambda _: 1.5)
    path = out / "zckpt_manifest.json"
    tree = json.loads(path.read_bytes())
    edit(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree["evaluation"]["mean"].update(hex="0x1p99999"),
        lambda tree: tree["tensors"].append(tree["tensors"][0]),
        lambda tree: tree["files"][0].update(name="x" * 300),
        lambda tree: tree["files"][0].update(name="../x"),
        lambda tree: tree["tensors"][0].update(file="other.safetensors"),
    ],
    ids=["overflow", "twice", "long", "outside", "unlisted"],
)
def test_manifests_that_cannot_be_are_corrupt(edit, out):
    edited(out, edit)
    with pytest.raises(errors.ManifestError):
        zckpt.open(out)
    assert [f.kind for f in zckpt.verify(out).findings] == ["corrupt"]


def test_a_manifest_that_is_nested_too_deeply_or_a_folder_is_corrupt(out):
    zckpt.save_consolidated(Small(), out)
    path = out / "zckpt_manifest.json"
    path.write_bytes(b'{"schema_version":1,"x":' + b"[" * 100_000)
    assert [f.kind for f in zckpt.verify(out).findings] == ["corrupt"]
    path.unlink()
    path.mkdir()
    assert [f.kind for f in zckpt.verify(out).findings] == ["corrupt"]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": "1MB"},
        {"save_total_limit": "3"},
        {"eval_fn": 3},
        {"overwrite": "no"},
        {"dtype": "int8"},
        {"stale": "maybe"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_the_wrong_kind_are_usage_errors(options, tmp_path):
    with pytest.raises(errors.UsageError, match=next(iter(options))):
        zckpt.save_consolidated(Small(), tmp_path / "checkpoint-1", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, "a\0b", "~nosuchuser/x", "x" * 300])
def test_a_path_that_is_none_is_a_usage_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UsageError, match="out_dir"):
        zckpt.save_consolidated(Small(), path)
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_shapes_is_refused(out):
    with pytest.raises(errors.UnsupportedError, match="weight is lazy"):
        zckpt.save_consolidated(nn.LazyLinear(3), out)


def test_a_disk_that_fills_up_is_no_space(out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(errors.NoSpaceError, match="No space left on device") as caught:
        zckpt.save_consolidated(Small(), out)
    assert caught.value.errno == errno.ENOSPC
    assert list(out.parent.iterdir()) == []


def test_a_tokenizer_that_writes_over_the_weights_is_an_error(out):
    class Bad:
        def save_pretrained(self, folder):
            from pathlib import Path

            Path(folder, "model.safetensors").write_text("mine")

    with pytest.raises(FileExistsError):
        zckpt.save_consolidated(Small(), out, tokenizer=Bad())
    assert list(out.parent.iterdir()) == []
