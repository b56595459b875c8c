"""The files of a ZeRO folder have to be of one save: what is missing, swapped or foreign is named.

Folders are made from real ones, or written anew. What is changed in a file is changed in the tree
that torch reads, and saved under the name that the file has, as another run would have done.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.errors import (
    CorruptCheckpointError,
    MissingParametersError,
    NotACheckpointError,
    UnsupportedError,
)
from zckpt.manifest import MANIFEST_NAME
from zckpt.testing.zero_folders import write_zero_folder

STAGE_1 = "z1-w3-shapes-bf16-0176"
STAGE_2 = "z2-w2-gpt2-tied-fp16-0189"
STAGE_3 = "z3-w3-gpt2-tied-bf16-0198"
FROZEN = "z3-w4-shapes-frozen-bf16-0189"
TWO_TAGS = "z3-w2-twotags-latest-older-bf16-0198"
KINDS = [
    "z1-w2-bf16opt-tied-0189",
    STAGE_1,
    STAGE_2,
    STAGE_3,
    FROZEN,
    "z3-w4-mics2-bf16-0189",
    "derived-z2-old-torch-format",
]
MODEL_0, MODEL_1 = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2))
OPTIM_0, OPTIM_1, OPTIM_2 = (
    f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)
)
MODEL = "mp_rank_00_model_states.pt"


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def assert_same(found, expected):
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}


def rewrite(path, change):
    """Change what a file holds, as torch and DeepSpeed see it."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def tag_of(place):
    return place / (place / "latest").read_text()


def refused(place, kind=CorruptCheckpointError):
    """The message with which a folder is refused, after which nothing is there."""
    out = place.parent / "out"
    with pytest.raises(kind) as caught:
        zckpt.convert(place, out)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name]
    return str(caught.value)


@pytest.fixture
def copy(zero_folder, tmp_path):
    """Return a function that copies a real folder to where it may be changed."""

    def make(name):
        place = tmp_path / "ckpt"
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(zero_folder(name).ckpt, place))

    return make


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a small folder, over what is there already."""

    def make(name="ckpt", *, seed=0, **changes):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"a": (5, 3), "b": (7,), "c": (), "d": (11, 2)}
        values = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        options = {"stage": 3, "world_size": 2, "groups": [values]}
        write_zero_folder(tmp_path / name, **(options | changes))
        return tmp_path / name, values

    return make


# ------------------------------------------------------------------ one file is not there


@pytest.mark.parametrize("name", KINDS)
def test_any_missing_file_is_named(name, copy):
    files = sorted(path.name for path in tag_of(copy(name)).iterdir())
    assert len(files) >= 3
    for file in files:
        place = copy(name)
        (tag_of(place) / file).unlink()
        message = refused(place)
        assert (file if file != MODEL else "*_model_states.pt") in message


@pytest.mark.parametrize("name", KINDS)
def test_the_last_ranks_of_all_files_are_missed(name, copy):
    place = copy(name)
    last = max(int(n) for n in re.findall(r"pp_rank_(\d+)", str(list(tag_of(place).iterdir()))))
    gone = [path for path in tag_of(place).iterdir() if f"pp_rank_{last}_" in path.name]
    for path in gone:
        path.unlink()
    assert any(path.name in refused(place) for path in gone)


@pytest.mark.parametrize("name", [STAGE_2, STAGE_3])
def test_without_its_optimizer_files_it_is_no_checkpoint(name, copy):
    place = copy(name)
    for path in tag_of(place).glob("*optim_states.pt"):
        path.unlink()
    assert "*_optim_states.pt" in refused(place)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DAMAGE = {
    "a third": lambda data: data[: len(data) // 3],
    "all but a byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "a pointer": lambda data: LFS,
    "a web page": lambda data: b"<!DOCTYPE html><html>404</html>",
    "longer": lambda data: data + bytes(100_000),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", [STAGE_2, STAGE_3, "derived-z2-old-torch-format"])
def test_any_damaged_file_is_named(name, damage, copy):
    place = copy(name)
    for path in sorted(tag_of(place).iterdir()):
        data = path.read_bytes()
        path.write_bytes(damage(data))
        message = refused(place)
        assert path.name in message
        assert ("git lfs pull" in message) == (damage(data) == LFS)
        path.write_bytes(data)
    assert len(zckpt.open(place)) > 0


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_what_is_no_file_does_not_count_as_one(kind, copy):
    place = copy(STAGE_3)
    path = tag_of(place) / OPTIM_1
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    assert OPTIM_1 in refused(place)


def test_links_are_followed_as_in_a_cache_of_downloads(zero_folder, tmp_path):
    folder = zero_folder(STAGE_3)
    (tmp_path / "ckpt" / "global_step3").mkdir(parents=True)
    (tmp_path / "ckpt" / "latest").symlink_to(folder.ckpt / "latest")
    for path in (folder.ckpt / "global_step3").iterdir():
        (tmp_path / "ckpt" / "global_step3" / path.name).symlink_to(path)
    zckpt.convert(tmp_path / "ckpt", tmp_path / "out")
    assert_same(zckpt.open(tmp_path / "out"), folder.expected)


# ------------------------------------------------------------------ files that are there too


def test_junk_is_ignored_with_a_note(copy, zero_folder, tmp_path):
    place = copy(STAGE_3)
    junk = [
        "zzz_model_states.pt",
        "copy_of_optim_states.pt",
        f"old_{OPTIM_0}",
        f"{OPTIM_1[:-3]}_states.pt",
    ]
    for name in junk:
        (tag_of(place) / name).write_bytes(b"junk")
    (tag_of(place) / "rng_state.pth").write_bytes(b"not looked at")
    (tag_of(place) / "sub").mkdir()
    report = zckpt.convert(place, tmp_path / "out")
    assert_same(zckpt.open(tmp_path / "out"), zero_folder(STAGE_3).expected)
    warnings = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["warnings"]
    for notes in (report.notes, warnings):
        assert [name for name in junk if not any(name in note for note in notes)] == []
        assert not any("rng_state" in note for note in notes)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_a_bigger_world_are_leftovers(stage, written):
    """Case a of a tag that is written twice: by three ranks, then by one."""
    written(stage=stage, world_size=3, seed=1)
    place, values = written(stage=stage, world_size=1, seed=2)
    opened = zckpt.open(place)
    assert_same(opened, values)
    left = sorted(
        p.name for p in tag_of(place).iterdir() if "_rank_0_" not in p.name and p.name != MODEL
    )
    assert len(left) == (4 if stage == 3 else 2)
    assert [name for name in left if not any(name in note for note in opened.notes)] == []
    assert len(opened.notes) == len(left)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_a_smaller_world_are_written_over(stage, written):
    written(stage=stage, world_size=1, seed=1)
    place, values = written(stage=stage, world_size=3, seed=2)
    opened = zckpt.open(place)
    assert_same(opened, values)
    assert opened.notes == ()


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_leftover_does_not_stand_in_for_a_rank_that_is_missing(kind, copy):
    place = copy("bad-z3-stale-rank-from-bigger-world")
    (path,) = tag_of(place).glob(f"*_rank_2_*{kind}_states.pt")
    path.unlink()
    assert path.name in refused(place)


# ------------------------------------------------------------------ files in the place of others


PAIRS = [
    (STAGE_3, OPTIM_0, OPTIM_1),
    (STAGE_3, OPTIM_1, OPTIM_2),
    (STAGE_3, MODEL_0, MODEL_1),
    (STAGE_3, MODEL_1, OPTIM_1),
    (FROZEN, MODEL_0, MODEL_1),
    (STAGE_1, OPTIM_0, OPTIM_2),
    ("derived-z2-old-torch-format", OPTIM_0, OPTIM_1),
]


@pytest.mark.parametrize("name, one, other", PAIRS)
def test_swapped_files_are_named(name, one, other, copy):
    place = copy(name)
    tag = tag_of(place)
    (tag / one).rename(tag / "aside")
    (tag / other).rename(tag / one)
    (tag / "aside").rename(tag / other)
    message = refused(place)
    assert one in message or other in message


@pytest.mark.parametrize("name", [STAGE_1, "z2-w2-offload-bf16-0198", "z1-w3-bf16opt-decay-0198"])
def test_swapped_ranks_show_in_what_they_hold_too(name, copy):
    """Saved anew under the other's name, as if they had never been renamed."""
    place = copy(name)
    tag = tag_of(place)
    trees = [torch.load(tag / file, weights_only=False) for file in (OPTIM_1, OPTIM_0)]
    for tree, file in zip(trees, (OPTIM_0, OPTIM_1), strict=True):
        torch.save(tree, tag / file)
    assert OPTIM_0 in refused(place)


def test_a_copy_of_another_rank_is_refused(copy):
    place = copy(STAGE_3)
    shutil.copy(tag_of(place) / OPTIM_0, tag_of(place) / OPTIM_2)
    message = refused(place)
    assert OPTIM_2 in message
    assert OPTIM_0 in message


@pytest.mark.parametrize("file", [MODEL_0, MODEL_1, OPTIM_0, OPTIM_1])
def test_a_file_of_another_step_is_refused(file, copy):
    """Case c: shapes and sizes fit, and only steps tell."""
    place = copy(TWO_TAGS)
    shutil.copy(place / "step-5" / file, place / "step-3" / file)
    kind = "model" if "model" in file else "optim"
    assert f"_rank_1_mp_rank_00_{kind}_states.pt" in refused(place)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_another_step_is_refused(stage, written):
    place, _ = written(stage=stage, global_steps=3)
    other, _ = written("other", stage=stage, global_steps=4, seed=1)
    shutil.copy(tag_of(other) / OPTIM_1, tag_of(place) / OPTIM_1)
    shutil.rmtree(other)
    message = refused(place)
    assert OPTIM_1 in message
    assert "step" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_another_world_size_is_refused(stage, written):
    """Case b: the rank of a run on one rank is larger, and says so."""
    place, _ = written(stage=stage, world_size=2)
    other, _ = written("other", stage=stage, world_size=1)
    tree = torch.load(tag_of(other) / OPTIM_0, weights_only=False)
    shutil.rmtree(other)
    torch.save(tree, tag_of(place) / OPTIM_1)
    message = refused(place)
    assert OPTIM_1 in message
    assert "partition_count" in message


def test_a_rank_of_a_bigger_world_is_refused_under_any_name(copy):
    place = copy("bad-z3-stale-rank-from-bigger-world")
    stale = torch.load(
        tag_of(place) / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", weights_only=False
    )
    torch.save(stale, tag_of(place) / OPTIM_2)
    message = refused(place)
    assert OPTIM_2 in message
    assert "4" in message


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_whose_values_are_of_another_run_is_refused(stage, written):
    """All that the files say fits; but masters do not round to the weights beside them."""
    place, _ = written(stage=stage)
    other, _ = written("other", stage=stage, seed=1)
    shutil.copy(tag_of(other) / OPTIM_1, tag_of(place) / OPTIM_1)
    shutil.rmtree(other)
    message = refused(place)
    assert OPTIM_1 in message
    assert MODEL in message


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_changed_on_purpose_before_the_save_are_a_note(stage, written):
    place, values = written(stage=stage)

    def halve(tree):
        for value in tree["module"].values():
            value.mul_(0.5)

    rewrite(tag_of(place) / MODEL, halve)
    opened = zckpt.open(place)
    assert_same(opened, values)
    (note,) = opened.notes
    assert "do not round" in note


# ------------------------------------------------------------------ what files say differs


def other_config(tree):
    tree["ds_config"]["gradient_clipping"] = 7.0


def other_rate(tree):
    state = tree["optimizer_state_dict"]
    inner = state.get("optimizer_state_dict") or state["base_optimizer_state"]
    inner["param_groups"][0]["lr"] = 0.5


def one_more_group(tree):
    state = tree["optimizer_state_dict"]
    for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
        if key in state:
            state[key] = [*state[key], torch.zeros(4)]


def longer_group(tree):
    (group, *rest) = tree["optimizer_state_dict"]["fp32_flat_groups"]
    tree["optimizer_state_dict"]["fp32_flat_groups"] = [torch.cat([group, group[:4]]), *rest]


def double_group(tree):
    groups = tree["optimizer_state_dict"]["fp32_flat_groups"]
    tree["optimizer_state_dict"]["fp32_flat_groups"] = [group.double() for group in groups]


def other_shape(tree):
    first = next(iter(tree["param_shapes"][0]))
    tree["param_shapes"][0][first] = torch.Size([1, *tree["param_shapes"][0][first]])


def one_name_less(tree):
    del tree["module"][next(iter(tree["module"]))]


DIFFERENT = {
    "version": (STAGE_3, OPTIM_1, lambda t: t.update(ds_version="0.1.2"), "0.1.2"),
    "version of a model file": (STAGE_3, MODEL_1, lambda t: t.update(ds_version="0.1.2"), "0.1.2"),
    "version in stage 1": (STAGE_1, OPTIM_2, lambda t: t.update(ds_version="0.1.2"), "0.1.2"),
    "configuration": (STAGE_3, OPTIM_1, other_config, "configuration"),
    "configuration in stage 2": (STAGE_2, OPTIM_1[5:], other_config, "configuration"),
    "learning rate": (STAGE_3, OPTIM_1, other_rate, "0.5"),
    "learning rate in stage 2": (STAGE_2, OPTIM_1[5:], other_rate, "learning rates"),
    "number of groups": (STAGE_3, OPTIM_2, one_more_group, "groups"),
    "number of groups in stage 2": (STAGE_2, OPTIM_1[5:], one_more_group, "groups"),
    "size of a group": (STAGE_3, OPTIM_2, longer_group, "groups"),
    "global step": (STAGE_3, MODEL_1, lambda t: t.update(global_steps=4), "global_steps"),
    "world size": (STAGE_3, MODEL_1, lambda t: t.update(dp_world_size=4), "dp_world_size"),
    "shapes": (STAGE_3, MODEL_1, other_shape, "param_shapes"),
    "names": (STAGE_3, MODEL_1, one_name_less, "names"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_file_that_says_something_else_is_named(name, copy):
    folder, file, change, word = DIFFERENT[name]
    place = copy(folder)
    rewrite(tag_of(place) / file, change)
    message = refused(place)
    assert file in message
    assert word in message


def test_one_rank_in_another_dtype_is_refused(copy):
    place = copy(STAGE_3)
    rewrite(tag_of(place) / OPTIM_1, double_group)
    message = refused(place)
    assert "float32" in message
    assert "float64" in message


def test_a_file_that_was_only_saved_anew_is_fine(copy, zero_folder):
    """So that the tests above fail for what they change."""
    for name, files in ((STAGE_3, (OPTIM_1, MODEL_1)), (STAGE_2, (OPTIM_1[5:], MODEL))):
        place = copy(name)
        for file in files:
            rewrite(tag_of(place) / file, lambda tree: None)
        opened = zckpt.open(place)
        assert_same(opened, zero_folder(name).expected)
        assert opened.notes == ()


@pytest.mark.parametrize("name, prefix", [(STAGE_3, "bf16_"), ("z2-w2-gpt2-tied-fp16-0189", "")])
def test_files_of_another_precision_in_the_same_tag_are_refused(name, prefix, copy):
    """A bf16 run and one of another precision saved the same tag; only the model file is common."""
    place = copy(name)
    here = f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    other = f"{'' if prefix else 'bf16_'}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(torch.load(tag_of(place) / here, weights_only=False), tag_of(place) / other)
    message = refused(place)
    assert here in message
    assert other in message


def test_model_files_of_two_stages_are_refused(copy, zero_folder):
    place = copy(STAGE_3)
    shutil.copy(zero_folder(STAGE_2).ckpt / "global_step3" / MODEL, tag_of(place))
    message = refused(place)
    assert MODEL_0 in message
    assert f" {MODEL}" in message


def test_a_model_file_of_another_stage_alone_is_refused(copy, zero_folder):
    place = copy(STAGE_3)
    for path in tag_of(place).glob("zero_*_model_states.pt"):
        path.unlink()
    shutil.copy(zero_folder("z2-w2-offload-bf16-0198").ckpt / "global_step3" / MODEL, tag_of(place))
    message = refused(place)
    assert OPTIM_0 in message
    assert MODEL in message


@pytest.mark.parametrize("key", ["group_paddings", "param_alignment_paddings", "partition_count"])
@pytest.mark.parametrize("value", [None, [], [7], [-1], ["a"], "a", [[1, 2]], 0, [0], -1])
def test_numbers_that_do_not_fit_are_refused_or_do_not_matter(key, value, copy, zero_folder):
    place = copy(STAGE_1)
    for path in tag_of(place).glob("*optim_states.pt"):
        rewrite(path, lambda tree: tree["optimizer_state_dict"].update({key: value}))
    try:
        opened = zckpt.open(place)
    except CorruptCheckpointError as error:
        assert str(tag_of(place)) in str(error)  # noqa: PT017 -- either is fine
    else:
        assert_same(opened, zero_folder(STAGE_1).expected)


KEYS_OF_MODELS = [
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
]
KEYS_OF_OPTIMIZERS = [
    "zero_stage",
    "partition_count",
    "optimizer_state_dict",
    "base_optimizer_state",
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "loss_scaler",
    "param_slice_mappings",
]


@pytest.mark.parametrize("value", [None, 5, "text", [1, "a"], {"a": 1}, {3: None}, [{}], 1.5])
@pytest.mark.parametrize("name", [STAGE_1, FROZEN])
def test_odd_values_are_refused_or_do_not_matter(name, value, copy, zero_folder):
    """Whatever stands under a key: the right values, or an error of zckpt's, never another."""
    folder = zero_folder(name)
    place = copy(name)
    for path in tag_of(place).glob("*_states.pt"):
        data = path.read_bytes()
        is_model = "model" in path.name
        for key in KEYS_OF_MODELS if is_model else KEYS_OF_OPTIMIZERS:
            tree = torch.load(path, weights_only=False)
            (tree if is_model else tree["optimizer_state_dict"])[key] = value
            torch.save(tree, path)
            try:
                opened = zckpt.open(place)
                found = dict(opened)
            except (CorruptCheckpointError, UnsupportedError) as error:
                assert str(place) in str(error)  # noqa: PT017 -- either is fine
            else:
                right = {n: bits(t) for n, t in folder.expected.items()}
                wrong = [n for n, t in found.items() if bits(t) != right.get(n)]
                lost = set(right) - set(found) - set(opened.missing)
                assert wrong == [], key
                assert not lost or opened.lacks_frozen or opened.left_out, key
        path.write_bytes(data)


# ------------------------------------------------------------------ what zckpt does not join


def test_an_optimizer_on_nvme_is_told(copy):
    place = copy(STAGE_3)
    for path in tag_of(place).glob("*_states.pt"):

        def empty(tree):
            offload = {"device": "nvme", "nvme_path": "/nvme"}
            tree["ds_config"]["zero_optimization"]["offload_optimizer"] = offload
            if "fp32_flat_groups" in tree.get("optimizer_state_dict", {}):
                groups = tree["optimizer_state_dict"]["fp32_flat_groups"]
                tree["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0) for _ in groups]

        rewrite(path, empty)
    message = refused(place)
    assert "NVMe" in message
    assert "save_consolidated" in message


@pytest.mark.parametrize("name", [STAGE_2, STAGE_3])
def test_tensor_parallel_is_refused(name, copy):
    place = copy(name)
    for path in tag_of(place).glob("*model_states.pt"):
        rewrite(path, lambda tree: tree.update(mp_world_size=2))
    message = refused(place, UnsupportedError)
    assert "mp_world_size=2" in message
    assert "save_consolidated" in message


@pytest.mark.parametrize(
    "file",
    ["zero_pp_rank_0_mp_rank_01_model_states.pt", OPTIM_0.replace("mp_rank_00", "mp_rank_01")],
)
def test_files_of_a_tensor_parallel_rank_are_refused(file, copy):
    place = copy(STAGE_3)
    (tag_of(place) / file).write_bytes(b"")
    assert file in refused(place, UnsupportedError)


@pytest.mark.parametrize(
    "file, word",
    [
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "mixture-of-experts"),
        ("expert_3_mp_rank_00_model_states.pt", "mixture-of-experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture-of-experts"),
        ("layer_03-model_states.pt", "pipeline"),
        ("layer_03-model_00-model_states.pt", "pipeline"),
    ],
)
def test_files_of_parallel_layers_are_refused(file, word, copy):
    place = copy(STAGE_2)
    (tag_of(place) / file).write_bytes(b"")
    message = refused(place, UnsupportedError)
    assert file in message
    assert word in message


def test_groups_over_different_ranks_are_refused_as_experts(copy):
    place = copy(STAGE_2)
    for path in tag_of(place).glob("*optim_states.pt"):
        rewrite(path, lambda tree: tree["optimizer_state_dict"].update(partition_count=[2, 1]))
    assert "expert" in refused(place, UnsupportedError)


def test_layers_that_are_split_over_experts_by_deepspeed_itself_are_refused(copy):
    place = copy(STAGE_2)
    rewrite(tag_of(place) / MODEL, lambda tree: tree.update(ds_autoep_layers=[{"name": "x"}]))
    assert "expert-parallel" in refused(place, UnsupportedError)


def test_a_tensor_that_safetensors_cannot_hold_is_refused(copy):
    place = copy(STAGE_2)

    def add(tree):
        tree["module"]["wave"] = torch.ones(2, dtype=torch.complex128)

    rewrite(tag_of(place) / MODEL, add)
    assert "wave" in refused(place, UnsupportedError)


# ------------------------------------------------------------------ names that are told nowhere


@pytest.mark.parametrize("name", ["z1-w2-bf16opt-tied-0189", STAGE_2, "z2-w1-llama-tied-bf16-0169"])
def test_aliases_are_found_by_storage_where_the_list_is_lost(name, copy, zero_folder):
    place = copy(name)
    for shared in ({}, None):
        rewrite(tag_of(place) / MODEL, lambda tree, s=shared: tree.update(shared_params=s))
        opened = zckpt.open(place)
        assert_same(opened, zero_folder(name).expected)
        ((alias, owner),) = opened.aliases.items()
        assert frozenset({alias, owner}) in zero_folder(name).ties
    rewrite(tag_of(place) / MODEL, lambda tree: tree.pop("shared_params"))
    assert_same(zckpt.open(place), zero_folder(name).expected)


def test_an_alias_that_is_lost_is_missed(copy, zero_folder, tmp_path):
    """Stage 3 leaves nothing else in the file that ties it to its owner."""
    place = copy(STAGE_3)
    rewrite(tag_of(place) / MODEL_0, lambda tree: tree.update(shared_params={}))
    message = refused(place, MissingParametersError)
    assert "lacks 1 parameters" in message
    assert "lm_head.weight" in message
    report = zckpt.convert(place, tmp_path / "out", allow_missing="lm_head.*")
    assert [left.name for left in report.left_out] == ["lm_head.weight"]
    expected = {n: t for n, t in zero_folder(STAGE_3).expected.items() if n != "lm_head.weight"}
    assert_same(zckpt.open(tmp_path / "out"), expected)


def test_a_list_of_aliases_that_is_wrong_does_not_tie_what_differs(written):
    place, values = written(stage=2)
    wrong = {"b": "a", "a": "nothing", "x": "b", "d": "d"}
    rewrite(tag_of(place) / MODEL, lambda tree: tree.update(shared_params=wrong))
    opened = zckpt.open(place)
    assert_same(opened, values)
    assert opened.aliases == {}


def test_the_first_name_of_the_module_is_the_owner(written):
    place, values = written(aliases={"x": "a", "y": "a"}, names=["x", "y", *"abcd"])
    opened = zckpt.open(place)
    assert opened.aliases == {"y": "x", "a": "x"}
    assert_same(opened, {**values, "x": values["a"], "y": values["a"]})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_no_tensor_in_the_module_is_left_out_and_said(stage, written, tmp_path):
    place, values = written(stage=stage)
    for path in tag_of(place).glob("*model_states.pt"):
        rewrite(path, lambda tree: tree["module"].update({"norm._extra_state": {"scale": 1}}))
    report = zckpt.convert(place, tmp_path / "out")
    assert_same(zckpt.open(tmp_path / "out"), values)
    assert [left.name for left in report.left_out] == ["norm._extra_state"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_that_are_no_numbers_are_values_all_the_same(stage, tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38])
    tensors = {"a": odd, "b": torch.full((200,), float("nan"))}
    write_zero_folder(tmp_path, stage=stage, world_size=2, groups=[tensors])
    opened = zckpt.open(tmp_path)
    assert_same(opened, tensors)
    assert opened.notes == ()


def test_buffers_that_differ_between_ranks_are_said(written, tmp_path):
    place, values = written(buffers={"mean": torch.ones(3), "count": torch.tensor(1)})

    def drift(tree):
        tree["module"]["mean"] = torch.zeros(3)

    rewrite(tag_of(place) / MODEL_1, drift)
    zckpt.convert(place, tmp_path / "out")
    assert_same(
        zckpt.open(tmp_path / "out"),
        {**values, "mean": torch.ones(3), "count": torch.tensor(1)},
    )
    warnings = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["warnings"]
    assert [warning for warning in warnings if "mean" in warning] != []
    assert not any("count" in warning for warning in warnings)


# ------------------------------------------------------------------ without deepspeed

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"deepspeed", "transformers", "peft", "accelerate"}:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
try:
    import deepspeed
except ModuleNotFoundError:
    print("blocked")

import zckpt
out, *folders = sys.argv[1:]
for number, folder in enumerate(folders):
    report = zckpt.convert(folder, f"{out}/{number}")
    assert zckpt.verify(report.path).is_fine
names = {"deepspeed", "transformers", "peft", "accelerate", "mytrainer_state"}
print(sorted(names & {name.partition(".")[0] for name in sys.modules}))
"""


def test_neither_deepspeed_nor_the_training_code_is_needed(zero_folder, tmp_path):
    names = ["z2-w2-clientstate-class-bf16-0169", STAGE_3, "z2-w2-sharedmodule-bf16-0198"]
    folders = [zero_folder(name) for name in names]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path), *(str(f.ckpt) for f in folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("blocked\n[]\n", 0), ran.stderr
    for number, folder in enumerate(folders):
        assert_same(zckpt.open(tmp_path / str(number)), folder.expected)


def test_a_class_of_the_training_code_is_what_torch_would_look_for(zero_folder):
    """So the folder above does need one to be unpickled."""
    path = zero_folder("z2-w2-clientstate-class-bf16-0169").ckpt / "global_step3" / MODEL
    with pytest.raises(ModuleNotFoundError, match="mytrainer_state"):
        torch.load(path, weights_only=False)


class Mine:
    """A class of the training code."""


def test_a_class_in_the_place_of_weights_is_named(written):
    place, _ = written(stage=2)
    rewrite(tag_of(place) / MODEL, lambda tree: tree.update(module=Mine()))
    message = refused(place)
    assert MODEL in message
    assert "Mine" in message


def test_a_folder_of_optimizer_files_alone_is_no_checkpoint(copy):
    place = copy(STAGE_2)
    (tag_of(place) / MODEL).unlink()
    with pytest.raises(CorruptCheckpointError, match="names and shapes"):
        zckpt.open(place / "global_step3")
    shutil.rmtree(tag_of(place))
    with pytest.raises(NotACheckpointError):
        zckpt.open(place)


# ------------------------------------------------------------------ contradictions inside a file


def test_model_file_of_another_save_is_found_by_steps_and_weights(copy):
    """In stages 1 and 2, where the module's weights are in the model file."""

    def another_save(tree):
        tree["global_steps"] += 5
        tree["module"] = {name: t + 1 for name, t in tree["module"].items()}

    place = copy(STAGE_2)
    rewrite(tag_of(place) / MODEL, another_save)
    assert MODEL in refused(place)


ODD = {
    "module larger than its shape": lambda t: t["module"].update(one=torch.zeros(4)),
    "module smaller than its shape": lambda t: t["module"].update(w1=torch.zeros(12, 13)),
    "no list of shapes": lambda t: t.update(param_shapes=3),
    "buffer names": lambda t: t.update(buffer_names=5),
    "shared_params": lambda t: t.update(shared_params={"a": ("x",), 3: "b"}),
    "step": lambda t: t.update(global_steps=float("nan")),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_in_a_model_file_are_no_crash(name, copy):
    place = copy(STAGE_1)
    rewrite(tag_of(place) / MODEL, ODD[name])
    if name in {"buffer names", "shared_params", "step"}:
        assert zckpt.convert(place, place.parent / "out").tensors == 9
    else:
        assert MODEL in refused(place)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "a", None])
def test_odd_steps_of_the_optimizer_are_no_crash(value, copy):
    def change(tree):
        for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["step"] = torch.tensor(value) if isinstance(value, float) else value

    place = copy(STAGE_3)
    rewrite(tag_of(place) / OPTIM_1, change)
    assert OPTIM_1 in refused(place)


def test_odd_slices_are_no_crash(copy):
    place = copy(STAGE_2)
    for rank in range(2):
        path = tag_of(place) / OPTIM_0[5:].replace("rank_0_", f"rank_{rank}_")
        rewrite(path, lambda t: t["optimizer_state_dict"].update(param_slice_mappings=[3]))
    assert "group 0" in refused(place)


@pytest.mark.parametrize("options", [{"tag": 5}, {"include": 5}, {"allow_missing": [3]}], ids=str)
def test_arguments_of_the_wrong_type_are_said_to_be(options, copy):
    with pytest.raises(zckpt.errors.UsageError):
        zckpt.convert(copy(STAGE_3), "out", **options)


# ------------------------------------------------------------------ what else people's folders hold


def test_a_conversion_does_not_replace_what_it_reads(copy):
    """A folder that holds a manifest and the ZeRO folder too, or the ZeRO folder below it."""
    place = copy(STAGE_3)
    zckpt.convert(place, place.parent / "other")
    for name in ("model.safetensors", MANIFEST_NAME):
        shutil.copy(place.parent / "other" / name, place / name)
    before = sorted(place.rglob("*"))
    for out in (place, tag_of(place)):
        with pytest.raises((zckpt.errors.UsageError, zckpt.errors.TargetExistsError)):
            zckpt.convert(place, out, overwrite=True)
    (place.parent / "link").symlink_to(place)
    with pytest.raises(zckpt.errors.UsageError, match="would be replaced"):
        zckpt.convert(place.parent / "link", place, overwrite=True)
    assert sorted(place.rglob("*")) == before


def test_files_beside_tags_are_not_taken_for_them(copy):
    place = copy(STAGE_3)
    for path in tag_of(place).iterdir():
        shutil.copy(path, place / path.name)
    assert "--tag" in refused(place)
    assert zckpt.open(place, tag=tag_of(place).name).tag == tag_of(place).name


def test_moments_that_only_some_ranks_have_are_of_two_saves(copy):
    place = copy(STAGE_3)
    rewrite(
        tag_of(place) / OPTIM_1, lambda t: t["optimizer_state_dict"].pop("optimizer_state_dict")
    )
    assert OPTIM_1 in refused(place)


def test_optimizer_files_of_the_next_step_are_said_to_be(copy):
    place = copy(STAGE_3)
    for rank in range(3):
        name = MODEL_0.replace("rank_0_", f"rank_{rank}_")
        rewrite(tag_of(place) / name, lambda t: t.update(global_steps=2))
    assert any("two saves" in note for note in zckpt.open(place).notes)


@pytest.mark.parametrize("stage", [2, 3])
def test_extra_state_of_any_kind(stage, tmp_path):
    """An empty tensor, as some libraries leave it, and objects that are no tensors."""
    weight = torch.randn(4, 3)
    folder = write_zero_folder(
        tmp_path / "zero", stage=stage, world_size=2, groups=[{"a.weight": weight}]
    )
    for path in folder.glob("*model_states.pt"):
        more = {"a._extra_state": torch.empty(0), "b._extra_state": b"x", "c._extra_state": {}}
        rewrite(path, lambda t, more=more: t["module"].update(more))
    report = zckpt.convert(tmp_path / "zero", tmp_path / "out")
    found = zckpt.open(tmp_path / "out")
    assert torch.equal(found["a.weight"], weight)
    assert found.spec("a._extra_state").role == "extra_state"
    assert [left.name for left in report.left_out] == ["b._extra_state", "c._extra_state"]


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_with_two_names_are_buffers(stage, tmp_path):
    """DeepSpeed lists each under one of them; also buffers without elements."""
    full, empty = torch.randn(3), torch.empty(0)
    folder = write_zero_folder(
        tmp_path / "zero",
        stage=stage,
        world_size=2,
        groups=[{"a.weight": torch.randn(4, 3)}],
        buffers={"b": full, "c": empty},
    )
    for path in folder.glob("*model_states.pt"):
        rewrite(path, lambda t: t["module"].update(b2=t["module"]["b"], c2=t["module"]["c"]))
    zckpt.convert(tmp_path / "zero", tmp_path / "out", dtype="bf16")
    found = zckpt.open(tmp_path / "out")
    assert found.aliases == {"b2": "b", "c2": "c"}
    assert torch.equal(found["b2"], full)
    assert {name: found.spec(name).role for name in found} == {
        "a.weight": "parameter",
        "b": "buffer",
        "b2": "buffer",
        "c": "buffer",
        "c2": "buffer",
    }


def test_more_files_than_a_process_may_hold_open(copy):
    place = copy(STAGE_3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, hard))
    try:
        report = zckpt.convert(place, place.parent / "out", max_shard_size=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(report.files) == 28
