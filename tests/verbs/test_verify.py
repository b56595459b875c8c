"""verify: says that a checkpoint is fine when it is, and what is wrong when it is not."""

import json
import math
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

import zckpt
from zckpt.errors import CorruptCheckpointError, NotACheckpointError, UsageError
from zckpt.manifest import MANIFEST_NAME, RUN_NAME
from zckpt.plan import INDEX_NAME

ONE = "model.safetensors"


class Model(nn.Module):
    """A tied pair, a buffer and a configuration like Hugging Face's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(6, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))


class Assets:
    def save_pretrained(self, folder):
        Path(folder, "vocab.json").write_text('{"a": 0}')


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    place = tmp_path_factory.mktemp("originals")
    zckpt.save_consolidated(Model(), place / "one", tokenizer=Assets(), eval_fn=lambda m: 1 / 3)
    zckpt.save_consolidated(Model(), place / "many", max_shard_size=100)
    zckpt.save_consolidated(Model(), place / "nan", eval_fn=lambda m: math.nan)
    assert len(list((place / "many").glob("*.safetensors"))) > 1
    return place


@pytest.fixture
def folder(originals, tmp_path):
    return shutil.copytree(originals / "one", tmp_path / "saved")


@pytest.fixture
def many(originals, tmp_path):
    return shutil.copytree(originals / "many", tmp_path / "saved")


def edit_json(path, change):
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree))


def rewrite(path, change, metadata=None):
    """Write a safetensors file anew, by the library, with its tensors and metadata changed."""
    with safe_open(path, "pt") as handle:
        kept = handle.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata=kept if metadata is None else metadata)


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def findings(folder, **options):
    report = zckpt.verify(folder, **options)
    assert report.is_fine == (not report.findings)
    return {(f.kind, f.where): f.what for f in report.findings}


def said(folder, **options):
    """All that was found, as one text."""
    return "\n".join(f"{k} {w}: {t}" for (k, w), t in findings(folder, **options).items())


# ------------------------------------------------------------------ fine


def test_a_fresh_checkpoint_is_fine(folder):
    report = zckpt.verify(folder)
    assert report.is_fine
    assert report.findings == ()
    assert report.has_manifest
    tensors = safetensors.torch.load_file(folder / ONE)
    assert report.tensors_checked == len(tensors)
    assert report.bytes_checked == sum(t.numel() * t.element_size() for t in tensors.values())
    assert (report.recorded_loss, report.loss, report.notes) == (None, None, ())


def test_a_folder_of_several_files_is_fine_wherever_it_is(many):
    moved = many.rename(many.parent / "elsewhere")
    assert zckpt.verify(moved).is_fine
    assert zckpt.verify(str(moved)).is_fine


def test_a_folder_of_transformers_has_its_headers_and_index_compared(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="2KB")
    report = zckpt.verify(tmp_path)
    assert report.is_fine
    assert not report.has_manifest
    assert report.tensors_checked == 0
    assert MANIFEST_NAME in report.notes[0]


def test_a_single_file_is_compared_with_itself(folder):
    assert zckpt.verify(folder / ONE).is_fine
    (folder / ONE).write_bytes((folder / ONE).read_bytes()[:-1])
    assert ONE in said(folder / ONE)


def test_what_comes_and_goes_beside_the_content_is_no_finding(folder):
    (folder / RUN_NAME).unlink()
    (folder / ".nfs0001").write_text("")
    assert zckpt.verify(folder).is_fine


# ------------------------------------------------------------------ files


def test_a_missing_file_is_named(folder):
    (folder / "vocab.json").unlink()
    assert findings(folder) == {("corrupt", "vocab.json"): "in the manifest, not in the folder"}


def test_a_missing_file_of_tensors_is_named(folder):
    (folder / ONE).unlink()
    assert ONE in said(folder)
    assert said(folder).startswith("corrupt")


def test_an_extra_file_is_named(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "deeper.txt").write_text("mine too")
    assert findings(folder) == dict.fromkeys(
        [("differs", "notes.txt"), ("differs", "sub/deeper.txt")],
        "in the folder, not in the manifest",
    )


def test_a_changed_file_is_named(folder):
    (folder / "vocab.json").write_text('{"b": 0}')
    assert "digest" in findings(folder)["differs", "vocab.json"]
    assert len(findings(folder)) == 1


def test_another_size_is_named(folder):
    (folder / "vocab.json").write_text('{"a": 0} ')
    assert findings(folder) == {("differs", "vocab.json"): "9 bytes, 8 in the manifest"}


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_a_cut_file_is_a_finding(folder, keep):
    (folder / ONE).write_bytes((folder / ONE).read_bytes()[:keep])
    assert ONE in said(folder)
    assert not zckpt.verify(folder, headers_only=True).is_fine


def test_a_changed_header_of_the_same_size_is_found_without_reading_tensors(folder):
    """The metadata belongs to the header and to no tensor."""
    data = (folder / ONE).read_bytes()
    assert data.count(b'"format":"pt"') == 1
    (folder / ONE).write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"'))
    found = findings(folder, headers_only=True)
    assert list(found) == [("corrupt", ONE)]
    assert "digest" in found["corrupt", ONE]


def test_a_lost_manifest_is_a_finding_where_its_run_record_is_left(folder):
    (folder / MANIFEST_NAME).unlink()
    assert ("corrupt", MANIFEST_NAME) in findings(folder)


def test_a_newer_manifest_is_not_called_corrupt(folder):
    (folder / MANIFEST_NAME).write_bytes(b'{"schema_version": 99}')
    with pytest.raises(zckpt.errors.ManifestVersionError, match="99"):
        zckpt.verify(folder)


@pytest.mark.parametrize("text", [b"", b"{"])
def test_a_garbled_manifest_is_a_finding(folder, text):
    (folder / MANIFEST_NAME).write_bytes(text)
    assert MANIFEST_NAME in said(folder)


# ------------------------------------------------------------------ tensors


def test_every_flipped_bit_of_a_tensor_is_found_by_name(folder):
    spans = {n: t.span for n, t in zckpt.open(folder).stored.items()}
    for name, span in spans.items():
        for position in (span.start, span.end - 1):
            flip(folder / ONE, position)
            assert list(findings(folder)) == [("corrupt", name)]
            flip(folder / ONE, position)
    assert zckpt.verify(folder).is_fine


def test_several_damaged_tensors_are_all_named(many):
    places = {n: (t.path, t.span.start) for n, t in zckpt.open(many).stored.items()}
    for path, start in places.values():
        flip(path, start)
    assert {where for _, where in findings(many)} == set(places)


def test_headers_only_reads_no_tensor(folder):
    flip(folder / ONE, -1)
    report = zckpt.verify(folder, headers_only=True)
    assert report.is_fine
    assert (report.tensors_checked, report.bytes_checked) == (0, 0)
    assert not zckpt.verify(folder).is_fine


def test_a_tensor_that_is_gone_is_named(folder):
    rewrite(folder / ONE, lambda tensors: tensors.pop("mid.bias"))
    assert findings(folder)["corrupt", "mid.bias"] == "in the manifest, in no file"


def test_a_tensor_too_many_is_named(folder):
    rewrite(folder / ONE, lambda tensors: tensors.update(more=torch.ones(1)))
    assert findings(folder)["corrupt", "more"] == "in a file, not in the manifest"


def test_another_shape_or_dtype_is_named(folder):
    def change(tensors):
        tensors["mid.weight"] = tensors["mid.weight"].reshape(2, 8)
        tensors["mid.bias"] = tensors["mid.bias"].view(torch.int32)

    rewrite(folder / ONE, change)
    found = findings(folder, headers_only=True)
    assert "(2, 8)" in found["corrupt", "mid.weight"]
    assert "int32" in found["corrupt", "mid.bias"]


def test_progress_ends_at_all_bytes(folder):
    calls = []
    report = zckpt.verify(folder, progress=lambda *call: calls.append(call))
    assert calls[-1] == (report.bytes_checked, report.bytes_checked)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == report.tensors_checked


# ------------------------------------------------------------------ aliases


def test_an_alias_that_is_stored_all_the_same_is_named(folder):
    rewrite(
        folder / ONE,
        lambda tensors: tensors.update({"head.weight": tensors["embed.weight"].clone()}),
    )
    assert "alias" in findings(folder)["corrupt", "head.weight"]


def test_an_alias_that_the_file_lacks_is_named(folder):
    rewrite(folder / ONE, lambda tensors: None, metadata={"format": "pt"})
    assert "None in the file" in findings(folder)["corrupt", "head.weight"]


def test_an_alias_that_the_manifest_lacks_is_named(folder):
    edit_json(folder / MANIFEST_NAME, lambda tree: tree.update(aliases=[]))
    assert "None in the manifest" in findings(folder)["corrupt", "head.weight"]


def test_an_alias_of_another_owner_is_named(folder):
    def change(tree):
        tree["aliases"][0]["owner"] = "mid.weight"

    edit_json(folder / MANIFEST_NAME, change)
    what = findings(folder)["corrupt", "head.weight"]
    assert "embed.weight in the file" in what
    assert "mid.weight in the manifest" in what


def test_an_alias_of_nothing_is_a_finding(folder):
    def change(tree):
        tree["aliases"][0]["owner"] = "nobody"

    edit_json(folder / MANIFEST_NAME, change)
    assert "nobody" in said(folder)


# ------------------------------------------------------------------ index


def index_names(folder):
    return json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]


@pytest.fixture(params=["zckpt", "Hugging Face"])
def indexed(request, many):
    """A folder of several files, with its manifest and without."""
    if request.param == "Hugging Face":
        (many / MANIFEST_NAME).unlink()
        (many / RUN_NAME).unlink()
    assert zckpt.verify(many).is_fine
    return many


def test_a_name_that_only_the_index_has_is_found(indexed):
    file = next(iter(index_names(indexed).values()))
    edit_json(indexed / INDEX_NAME, lambda tree: tree["weight_map"].update(ghost=file))
    assert "ghost" in said(indexed)


def test_a_name_that_the_index_lacks_is_found(indexed):
    edit_json(indexed / INDEX_NAME, lambda tree: tree["weight_map"].pop("mid.bias"))
    assert "mid.bias" in said(indexed)


def test_a_name_that_the_index_puts_into_another_file_is_found(indexed):
    names = index_names(indexed)
    other = next(file for file in names.values() if file != names["mid.bias"])
    edit_json(indexed / INDEX_NAME, lambda tree: tree["weight_map"].update({"mid.bias": other}))
    assert "mid.bias" in said(indexed)


def test_a_file_that_the_index_lacks_is_found(indexed):
    safetensors.torch.save_file({"x": torch.ones(1)}, indexed / "model-x.safetensors")
    assert "model-x.safetensors" in said(indexed)


def test_a_file_that_only_the_index_names_is_found(indexed):
    edit_json(
        indexed / INDEX_NAME, lambda tree: tree["weight_map"].update(ghost="gone.safetensors")
    )
    assert "gone.safetensors" in said(indexed)


def test_a_missing_index_is_found(many):
    (many / INDEX_NAME).unlink()
    assert ("corrupt", INDEX_NAME) in findings(many)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"weight_map": 1}'])
def test_a_garbled_index_is_a_finding(indexed, text):
    (indexed / INDEX_NAME).write_bytes(text)
    assert INDEX_NAME in said(indexed)


def test_an_empty_placeholder_of_a_foreign_file_is_pointed_out(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.empty(0)}
    safetensors.torch.save_file(tensors, tmp_path / ONE)
    found = findings(tmp_path)
    assert list(found) == [("differs", "b")]
    assert "placeholder" in found["differs", "b"]


# ------------------------------------------------------------------ evaluation


def test_the_recorded_loss_is_compared_exactly(folder):
    paths = []
    report = zckpt.verify(folder, eval_fn=lambda path: paths.append(path) or 1 / 3)
    assert report.is_fine
    assert report.loss == report.recorded_loss == 1 / 3
    assert paths == [str(folder)]
    found = findings(folder, eval_fn=lambda path: math.nextafter(1 / 3, 1))
    assert list(found) == [("differs", "evaluation")]
    assert repr(1 / 3) in found["differs", "evaluation"]


@pytest.mark.parametrize("factor, rtol, is_fine", [(1.01, 0.02, True), (1.03, 0.02, False)])
def test_the_tolerance_is_relative_to_the_recorded_loss(folder, factor, rtol, is_fine):
    for sign in (factor, 2 - factor):
        report = zckpt.verify(folder, eval_fn=lambda path, sign=sign: sign / 3, rtol=rtol)
        assert report.is_fine == is_fine


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_differs_whatever_the_tolerance(folder, loss):
    assert ("differs", "evaluation") in findings(folder, eval_fn=lambda path: loss, rtol=1.0)


def test_a_nan_equals_a_recorded_nan_and_nothing_else(originals):
    assert zckpt.verify(originals / "nan", eval_fn=lambda path: math.nan).is_fine
    found = findings(originals / "nan", eval_fn=lambda path: 1.0, rtol=10.0)
    assert list(found) == [("differs", "evaluation")]


def test_a_loss_of_other_values_than_the_saved_ones_is_explained(tmp_path):
    zckpt.save_consolidated(Model(), tmp_path / "cast", dtype="bf16", eval_fn=lambda m: 1.0)
    assert "live values" in said(tmp_path / "cast", eval_fn=lambda path: 2.0)


def test_an_infinite_loss_equals_itself(tmp_path):
    zckpt.save_consolidated(Model(), tmp_path / "inf", eval_fn=lambda m: math.inf)
    assert zckpt.verify(tmp_path / "inf", eval_fn=lambda path: math.inf).is_fine
    assert not zckpt.verify(tmp_path / "inf", eval_fn=lambda path: -math.inf).is_fine
    assert not zckpt.verify(tmp_path / "inf", eval_fn=lambda path: 1.0, rtol=0.5).is_fine


# ------------------------------------------------------------------ without digests


def test_tensors_without_digests_are_counted_and_not_checked(folder):
    def forget(tree):
        for record in tree["tensors"][:2]:
            record["digest"] = None

    edit_json(folder / MANIFEST_NAME, forget)
    stored = len(safetensors.torch.load_file(folder / ONE))
    report = zckpt.verify(folder)
    assert report.is_fine
    assert report.tensors_checked == stored - 2
    assert report.notes == ("2 tensors were written without digests; their bytes were not checked",)
    assert zckpt.verify(folder, headers_only=True).notes == ()


# ------------------------------------------------------------------ against what it was made from


LLAMA = "z3-w2-llama-tied-fp16-0198"


def state(**changes):
    """The model's tensors by name, under each name one of their own."""
    return {n: t.detach().clone() for n, t in Model().state_dict().items()} | changes


def stored(tensors, path):
    path.mkdir()
    safetensors.torch.save_file(tensors, path / ONE)
    return path


def test_against_its_own_values_it_is_fine(folder, tmp_path):
    tensors = state()
    report = zckpt.verify(folder, against=stored(tensors, tmp_path / "source"))
    assert report.is_fine
    assert report.against == tmp_path / "source"
    assert report.tensors_compared == len(tensors)  # the tied one with either of its copies
    assert zckpt.verify(folder, against=folder).tensors_compared == len(tensors) - 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_against_wider_values_they_are_rounded_once(tmp_path, dtype):
    zckpt.save_consolidated(Model(), tmp_path / "cast", dtype=dtype)
    source = stored(state(), tmp_path / "source")
    report = zckpt.verify(tmp_path / "cast", against=source)
    assert report.is_fine
    assert any(
        f"float32 values cast to {'bfloat16' if dtype == 'bf16' else 'float16'}" in n
        for n in report.notes
    )
    nearly = state()["mid.weight"].view(-1)
    nearly[3] *= 1.02
    source = stored(state(**{"mid.weight": nearly.view(4, 4)}), tmp_path / "nearly")
    found = findings(tmp_path / "cast", against=source)
    assert list(found) == [("differs", "mid.weight")]
    assert found["differs", "mid.weight"].startswith("1 of 16 elements are not those of SRC")


def test_against_a_zero_folder(zero_folder, tmp_path):
    """What DeepSpeed itself trained with is its masters, rounded."""
    source = zero_folder(LLAMA)
    for name, tensors in (("masters", source.expected), ("live", source.live)):
        out = stored({n: t.clone() for n, t in tensors.items()}, tmp_path / name)
        report = zckpt.verify(out, against=source.ckpt)
        assert report.is_fine
        assert report.against == source.ckpt / "global_step3"
        assert report.tensors_compared == len(tensors)
    assert zckpt.verify(out, against=source.ckpt, tag="global_step3").is_fine
    with pytest.raises(NotACheckpointError, match="no_such_step"):
        zckpt.verify(out, against=source.ckpt, tag="no_such_step")
    live = {n: t.clone() for n, t in source.live.items()}
    live["model.norm.weight"].view(torch.int16)[5] ^= 1
    out = stored(live, tmp_path / "flipped")
    assert list(findings(out, against=source.ckpt)) == [("differs", "model.norm.weight")]


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"mid.bias": torch.zeros(4)}, "4 of 4 elements are not those of SRC: max abs"),
        ({"mid.bias": torch.zeros(5)}, "shape [4], [5] in SRC"),
        ({"mid.bias": torch.zeros(4, dtype=torch.int32)}, "float32, int32 in SRC"),
        ({"steps": torch.tensor(8)}, "1 of 1 elements are not those of SRC: max abs 1,"),
        ({"more": torch.zeros(1)}, "in SRC, not here"),
    ],
)
def test_against_something_else(folder, tmp_path, changes, what):
    source = stored(state(**changes), tmp_path / "source")
    (name,) = changes
    found = findings(folder, against=source)
    assert list(found) == [("differs", name)]
    assert found["differs", name].startswith(what)


def test_a_shared_tensor_is_one_finding(folder, tmp_path):
    other = Model()
    with torch.no_grad():
        other.embed.weight[0, 0] += 1.0
    zckpt.save_consolidated(other, tmp_path / "other")
    report = zckpt.verify(folder, against=tmp_path / "other")
    assert [finding.where for finding in report.findings] == ["embed.weight"]


def test_against_less_than_it_has(folder, tmp_path):
    tensors = state()
    del tensors["steps"]
    found = findings(folder, against=stored(tensors, tmp_path / "source"))
    assert found == {("differs", "steps"): "here, not in SRC"}


def test_what_the_manifest_says_was_left_out_may_be_missing(folder, tmp_path):
    source = stored(state(more=torch.zeros(1)), tmp_path / "source")
    left = {"name": "more", "reason": "not asked for"}
    edit_json(folder / MANIFEST_NAME, lambda tree: tree.update(left_out=[left]))
    report = zckpt.verify(folder, against=source)
    assert report.is_fine
    assert "left out, as the manifest says: more" in report.notes


def test_a_tie_has_to_be_there_where_both_record_ties(folder, tmp_path):
    untied = Model()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    zckpt.save_consolidated(untied, tmp_path / "untied")
    one, two = ("differs", "embed.weight"), "one tensor with head.weight"
    assert findings(folder, against=tmp_path / "untied") == {one: f"{two} here only"}
    assert findings(tmp_path / "untied", against=folder) == {one: f"{two} in SRC only"}


def test_a_damaged_tensor_is_found_against_its_source_too(folder, tmp_path):
    flip(folder / ONE, -1)
    kinds = [kind for kind, _ in findings(folder)]
    report = zckpt.verify(folder, against=stored(state(), tmp_path / "source"))
    assert kinds == ["corrupt"]
    assert [finding.kind for finding in report.findings] == ["corrupt", "differs"]


def test_a_folder_without_a_manifest_is_compared_with_its_source(tmp_path):
    out, source = (stored(state(), tmp_path / name) for name in ("out", "source"))
    report = zckpt.verify(out, against=source)
    assert report.is_fine
    assert (report.has_manifest, report.tensors_compared) == (False, len(state()))


def test_comparing_writes_nothing(folder, zero_folder):
    source = zero_folder(LLAMA).ckpt
    before = {p: p.stat().st_mtime_ns for top in (folder, source) for p in top.rglob("*")}
    zckpt.verify(folder, against=source)
    after = {p: p.stat().st_mtime_ns for top in (folder, source) for p in top.rglob("*")}
    assert after == before


def test_progress_counts_both_sides(folder, tmp_path):
    calls = []
    source = stored(state(), tmp_path / "source")
    report = zckpt.verify(folder, against=source, progress=lambda *call: calls.append(call))
    total = report.bytes_checked + report.bytes_compared
    assert calls[-1] == (total, total)
    assert {whole for _, whole in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize(
    "options, what", [({"tag": "step"}, "against"), ({"headers_only": True}, "headers_only")]
)
def test_what_does_not_go_with_against_is_refused(folder, options, what):
    against = {} if "tag" in options else {"against": folder}
    with pytest.raises(UsageError, match=what):
        zckpt.verify(folder, **options, **against)


def test_a_source_that_cannot_be_read_is_an_error_and_no_finding(folder, tmp_path):
    source = stored(state(), tmp_path / "source")
    (source / ONE).write_bytes((source / ONE).read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="source"):
        zckpt.verify(folder, against=source)
    with pytest.raises(NotACheckpointError):
        zckpt.verify(folder, against=tmp_path / "nowhere")


# ------------------------------------------------------------------ refusals


def test_there_has_to_be_a_recorded_evaluation(many):
    with pytest.raises(UsageError, match="no recorded evaluation"):
        zckpt.verify(many, eval_fn=lambda path: 1.0)
    (many / MANIFEST_NAME).unlink()
    with pytest.raises(UsageError, match="no recorded evaluation"):
        zckpt.verify(many, eval_fn=lambda path: 1.0)


@pytest.mark.parametrize("rtol", [-1e-9, -1.0, math.nan])
def test_a_tolerance_below_zero_is_refused(folder, rtol):
    with pytest.raises(UsageError, match="rtol"):
        zckpt.verify(folder, eval_fn=lambda path: 1.0, rtol=rtol)


def test_nothing_to_verify_is_an_error_and_no_finding(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotACheckpointError):
            zckpt.verify(path)
