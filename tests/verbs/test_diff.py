"""diff: finds what differs between any two checkpoints, says how far, and nothing else."""

import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zckpt
from zckpt.errors import CorruptCheckpointError, NotACheckpointError, UsageError

LLAMA = "z3-w2-llama-tied-fp16-0198"
GPT2 = "z2-w2-gpt2-tied-fp16-0189"


@pytest.fixture
def put(tmp_path):
    """Write tensors as a Hugging Face folder."""

    def write(name, tensors, metadata=None):
        folder = tmp_path / name
        folder.mkdir()
        contiguous = {key: value.clone() for key, value in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata=metadata)
        return folder

    return write


def outcomes(report):
    return {row.name: row.outcome for row in report.rows}


def row_of(report, name):
    (row,) = (row for row in report.rows if row.name == name)
    return row


def some():
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(300, 7, generator=generator),
        "b": torch.arange(5),
        "c": torch.tensor(True),
        "empty": torch.empty(0, 3),
    }


# ------------------------------------------------------------------ outcomes


def test_equal_bits_are_the_same(put):
    report = zckpt.diff(put("one", some()), put("two", some()))
    assert report.is_same
    assert outcomes(report) == dict.fromkeys(some(), "equal")
    assert report.counts == {"equal": 4}
    assert report.tensors_compared == 4
    assert report.read_bytes == 2 * sum(t.nbytes for t in some().values())
    assert report.notes == ()
    assert row_of(report, "a").differing_numel == row_of(report, "a").max_abs == 0


def test_other_values_are_counted_and_measured(put):
    changed = some()
    changed["a"][3, 2] += 0.5
    changed["a"][200, 0] = 0.0
    changed["b"][4] = 6
    one, two = put("one", some()), put("two", changed)
    report = zckpt.diff(one, two)
    assert not report.is_same
    assert outcomes(report) == {"a": "differs", "b": "differs", "c": "equal", "empty": "equal"}
    x, y = some()["a"].double(), changed["a"].double()
    row = row_of(report, "a")
    assert row.differing_numel == 2
    assert row.max_abs == (x - y).abs().max().item()
    assert row.max_rel == 1.0  # the one that became 0
    assert (row_of(report, "b").max_abs, row_of(report, "b").max_rel) == (2.0, 2 / 6)
    mirrored = row_of(zckpt.diff(two, one), "a")
    assert (mirrored.max_abs, mirrored.max_rel) == (row.max_abs, row.max_rel)


def test_another_shape_is_not_compared(put):
    changed = some() | {"a": some()["a"].reshape(7, 300)}
    row = row_of(zckpt.diff(put("one", some()), put("two", changed)), "a")
    assert (row.outcome, row.is_difference) == ("shape", True)
    assert (row.a.shape, row.b.shape) == ((300, 7), (7, 300))
    assert (row.differing_numel, row.max_abs, row.max_rel) == (None, None, None)


def test_another_dtype_differs_and_is_measured_all_the_same(put):
    changed = some() | {"a": some()["a"].bfloat16(), "b": some()["b"].to(torch.int32)}
    report = zckpt.diff(put("one", some()), put("two", changed), rtol=1.0)
    assert not report.is_same
    assert outcomes(report) == {"a": "dtype", "b": "dtype", "c": "equal", "empty": "equal"}
    x, y = some()["a"].double(), changed["a"].double()
    row = row_of(report, "a")
    assert row.differing_numel == int((x != y).sum())
    assert row.max_abs == (x - y).abs().max().item()
    assert 0 < row.max_rel <= 2**-8
    assert row_of(report, "b").max_abs == 0.0


def test_names_of_one_side_only(put):
    one, two = some(), some()
    del one["b"], two["c"]
    report = zckpt.diff(put("one", one), put("two", two))
    assert outcomes(report) == {"a": "equal", "c": "only in A", "empty": "equal", "b": "only in B"}
    assert row_of(report, "c").b is None
    assert row_of(report, "b").a is None
    assert not report.is_same


def test_a_nan_is_infinitely_far_from_a_number(put):
    changed = some()
    changed["a"][0, 0] = math.nan
    one, two = put("one", some()), put("two", changed)
    row = row_of(zckpt.diff(one, two, rtol=1.0, atol=1e30), "a")
    assert (row.outcome, row.differing_numel) == ("differs", 1)
    assert (row.max_abs, row.max_rel) == (math.inf, math.inf)
    assert zckpt.diff(two, two).is_same


def test_the_sign_of_zero_counts_unless_there_is_a_tolerance(put):
    one, two = put("one", {"a": torch.tensor([0.0])}), put("two", {"a": torch.tensor([-0.0])})
    row = row_of(zckpt.diff(one, two), "a")
    assert (row.outcome, row.differing_numel, row.max_abs) == ("differs", 1, 0.0)
    assert outcomes(zckpt.diff(one, two, atol=1e-30)) == {"a": "close"}


@pytest.mark.parametrize(
    "tolerance, outcome",
    [
        ({}, "differs"),
        ({"atol": 0.25}, "close"),
        ({"atol": 0.2499}, "differs"),
        ({"rtol": 0.2}, "close"),
        ({"rtol": 0.1999}, "differs"),
    ],
)
def test_what_a_tolerance_accepts(put, tolerance, outcome):
    one, two = {"a": torch.tensor([1.0, 3.0])}, {"a": torch.tensor([1.25, 3.0])}
    report = zckpt.diff(put("one", one), put("two", two), **tolerance)
    assert outcomes(report) == {"a": outcome}
    assert report.is_same == (outcome == "close")
    assert row_of(report, "a").differing_numel == 1
    assert (report.rtol, report.atol) == (tolerance.get("rtol", 0), tolerance.get("atol", 0))


def test_a_difference_is_found_wherever_it_is(put):
    """In every part of a tensor of several blocks that is read, and cut, at odd places."""
    size = (17 << 20) // 2 + 1
    one = torch.zeros(size, dtype=torch.bfloat16)
    folder = put("one", {"a": one})
    for position in (0, (1 << 19) - 1, 1 << 19, (16 << 20) // 2, size - 1):
        two = one.clone()
        two[position] = 1.0
        save_file({"a": two}, folder.parent / "two.safetensors")
        row = row_of(zckpt.diff(folder, folder.parent / "two.safetensors", jobs=3), "a")
        assert (row.differing_numel, row.max_abs) == (1, 1.0)


# ------------------------------------------------------------------ names


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(2)
        self.wte = nn.Embedding(6, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        else:
            self.head.weight = nn.Parameter(self.wte.weight.detach().clone())


def test_a_tie_is_no_difference_where_the_values_agree(tmp_path):
    zckpt.save_consolidated(Tied(), tmp_path / "tied")
    zckpt.save_consolidated(Tied(tied=False), tmp_path / "untied")
    for names, sides in ((("tied", "untied"), "AB"), (("untied", "tied"), "BA")):
        report = zckpt.diff(*(tmp_path / name for name in names))
        assert report.is_same
        assert report.counts == {"equal": 4}
        assert report.notes == (
            f"wte.weight, head.weight: one tensor in {sides[0]}, stored as several in {sides[1]}",
        )


def test_a_tie_that_no_longer_holds_is_a_difference_of_values(tmp_path):
    untied = Tied(tied=False)
    with torch.no_grad():
        untied.head.weight[0, 0] += 1.0
    zckpt.save_consolidated(Tied(), tmp_path / "tied")
    zckpt.save_consolidated(untied, tmp_path / "untied")
    report = zckpt.diff(tmp_path / "tied", tmp_path / "untied")
    assert row_of(report, "head.weight").outcome == "differs"
    assert row_of(report, "wte.weight").outcome == "equal"


def test_names_that_share_a_tensor_on_both_sides_are_compared_once(tmp_path):
    zckpt.save_consolidated(Tied(), tmp_path / "one")
    other = Tied()
    with torch.no_grad():
        other.wte.weight[0, 0] += 1.0
    zckpt.save_consolidated(other, tmp_path / "two")
    report = zckpt.diff(tmp_path / "one", tmp_path / "two")
    assert outcomes(report)["wte.weight"] == outcomes(report)["head.weight"] == "differs"
    assert report.tensors_compared == 3
    assert report.notes == ()


def test_a_hugging_face_folder_leaves_out_tied_names(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "theirs")
    zckpt.save_consolidated(model, tmp_path / "ours")
    for names in (("ours", "theirs"), ("theirs", "ours")):
        report = zckpt.diff(*(tmp_path / name for name in names))
        assert report.is_same
        assert set(outcomes(report)) == set(model.state_dict())
        assert "lm_head.weight" in report.notes[0]


def test_a_name_that_is_missing_where_ties_are_recorded_is_a_difference(put, tmp_path):
    zckpt.save_consolidated(Tied(), tmp_path / "tied")
    kept = {n: t.detach() for n, t in Tied().state_dict().items() if n != "head.weight"}
    assert zckpt.diff(tmp_path / "tied", put("bare", kept)).is_same
    other = {"other": "mid.weight"}
    report = zckpt.diff(tmp_path / "tied", put("saying", kept, other), exclude="other")
    assert outcomes(report)["head.weight"] == "only in A"


def test_an_outer_module_is_looked_past(put):
    wrapped = {f"module.{name}": tensor for name, tensor in some().items()}
    one, two = put("one", some()), put("two", wrapped)
    for report in (zckpt.diff(one, two), zckpt.diff(two, one)):
        assert report.is_same
        assert report.counts == {"equal": 4}
        assert "'module.'" in report.notes[0]
    assert outcomes(zckpt.diff(two, one)) == dict.fromkeys(some(), "equal")


def test_patterns_choose_the_names(put):
    one, two = put("one", some()), put("two", some() | {"b": torch.zeros(5)})
    assert zckpt.diff(one, two, include="[ac]").is_same
    assert set(outcomes(zckpt.diff(one, two, include=["a", "b"]))) == {"a", "b"}
    assert zckpt.diff(one, two, exclude="b").is_same
    with pytest.raises(UsageError, match=r"none matches .*: .*\bempty\b"):
        zckpt.diff(one, two, include="d*")


def test_nothing_in_common(put):
    report = zckpt.diff(put("one", {"x": torch.ones(1)}), put("two", {"y": torch.ones(1)}))
    assert outcomes(report) == {"x": "only in A", "y": "only in B"}
    assert report.tensors_compared == 0


# ------------------------------------------------------------------ ZeRO folders


@pytest.mark.parametrize("name", [LLAMA, GPT2])
def test_a_zero_folder_has_the_masters_that_deepspeed_gathered(zero_folder, put, name):
    folder = zero_folder(name)
    report = zckpt.diff(folder.ckpt, put("masters", folder.expected))
    assert report.is_same
    assert set(outcomes(report)) == set(folder.expected)
    assert report.a == folder.ckpt / "global_step3"
    assert "one tensor in A, stored as several in B" in report.notes[-1]


def test_a_zero_folder_differs_from_the_weights_that_trained(zero_folder, put):
    folder = zero_folder(LLAMA)
    live = put("live", folder.live)
    report = zckpt.diff(live, folder.ckpt)
    assert report.counts == {"dtype": len(folder.live)}
    for row in report.rows:
        x, y = folder.live[row.name].double(), folder.expected[row.name].double()
        assert row.differing_numel == int((x != y).sum())
        assert row.max_abs == (x - y).abs().max().item()


def test_one_changed_weight_of_a_zero_folder_is_found(zero_folder, put):
    folder = zero_folder(GPT2)
    changed = {name: tensor.clone() for name, tensor in folder.expected.items()}
    changed["transformer.h.1.mlp.c_fc.weight"].view(-1)[-1] *= 2
    report = zckpt.diff(folder.ckpt, put("changed", changed))
    (row,) = (row for row in report.rows if row.is_difference)
    assert row.name == "transformer.h.1.mlp.c_fc.weight"
    assert (row.outcome, row.differing_numel, row.max_rel) == ("differs", 1, 0.5)


def test_tags_choose_the_checkpoint(zero_folder, tmp_path):
    folder = shutil.copytree(zero_folder(LLAMA).ckpt, tmp_path / "run")
    shutil.copytree(folder / "global_step3", folder / "again")
    report = zckpt.diff(folder, folder, tag_a="global_step3", tag_b="again")
    assert report.is_same
    assert (report.a.name, report.b.name) == ("global_step3", "again")
    with pytest.raises(NotACheckpointError, match="nowhere"):
        zckpt.diff(folder, folder, tag_b="nowhere")


# ------------------------------------------------------------------ around it


def test_progress_ends_at_all_bytes(put):
    calls = []
    one, two = put("one", some()), put("two", some())
    report = zckpt.diff(one, two, progress=lambda *call: calls.append(call))
    assert calls[-1] == (report.read_bytes, report.read_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_cut_file_is_an_error(put):
    one, two = put("one", some()), put("two", some())
    path = two / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"two/model\.safetensors"):
        zckpt.diff(one, two)


@pytest.mark.parametrize(
    "options",
    [{"rtol": -1.0}, {"atol": math.nan}, {"rtol": math.inf}, {"atol": -1e-9}, {"jobs": 0}],
)
def test_bad_arguments_are_refused(put, options):
    one = put("one", some())
    with pytest.raises(UsageError, match=next(iter(options))):
        zckpt.diff(one, one, **options)


def test_nothing_to_compare_is_an_error(put, tmp_path):
    one = put("one", some())
    for pair in ((one, tmp_path / "nowhere"), (tmp_path / "nowhere", one), (one, tmp_path)):
        with pytest.raises(NotACheckpointError):
            zckpt.diff(*pair)
