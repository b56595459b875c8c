"""Real ZeRO folders are read bit for bit, and damaged ones are refused by name.

What is in them is in `tests/zero/README.md`, what they hold was gathered by DeepSpeed itself.
"""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, safe_open

import zckpt
from zckpt.errors import (
    CorruptCheckpointError,
    MissingParametersError,
    NoSpaceError,
    NotACheckpointError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.manifest import MANIFEST_NAME
from zckpt.testing.zero_folders import write_zero_folder

FOLDERS = sorted(path.name for path in (Path(__file__).parents[1] / "zero").iterdir())
PARALLEL = ["z1-w2-pipeline2-bf16-0189", "z2-w2-moe-ep2-bf16-0198"]
GOOD = [n for n in FOLDERS if n[0] in "zd" and n not in PARALLEL]
DAMAGED = [n for n in FOLDERS if n.startswith("bad-")]
INCOMPLETE = {
    "z2-w2-lora-excludefrozen-bf16-0198": {"exclude_frozen": True},
    "z3-w2-frozen-bf16-083": {"allow_missing": "*"},
    "z3-w2-lora-unowned-base-bf16-0189": {"allow_missing": "base_model.*"},
}
"""Folders that lack parameters, and what it takes to convert them all the same."""

SMALL = "z1-w3-shapes-bf16-0176"
TWO_TAGS = "z3-w2-twotags-latest-older-bf16-0198"


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def wrong(found, expected):
    """Names whose tensors are not the same bit for bit, or are on one side only."""
    both = set(found) & set(expected)
    differ = {name for name in both if bits(found[name]) != bits(expected[name])}
    return sorted(set(found) ^ set(expected) | differ)


def stored(out):
    """What safetensors itself reads in a folder: tensors by name, and their files' metadata."""
    tensors, metadata = {}, {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
        with safe_open(path, "pt") as file:
            metadata |= file.metadata()
    return tensors, metadata


def assert_nothing_is_left(place):
    assert [path.name for path in place.iterdir()] == []


def copied(folder, place):
    return Path(shutil.copytree(folder.ckpt, place, symlinks=True))


# ------------------------------------------------------------------ good folders


def test_every_folder_is_tested():
    assert len(GOOD) == 46
    assert len(DAMAGED) == 12
    assert set(FOLDERS) == {*GOOD, *DAMAGED, *PARALLEL, "README.md"}


@pytest.mark.parametrize("name", GOOD)
def test_values_are_those_of_the_engine(name, zero_folder):
    folder = zero_folder(name)
    opened = zckpt.open(folder.ckpt)
    if folder.facts["stage"] == 0:
        masters = {n: t.bfloat16() for n, t in opened.items()}
        assert wrong(masters, folder.live) == []
        assert {t.dtype for t in opened.values()} == {torch.float32}
    else:
        assert wrong(opened, folder.expected) == []
    groups = {name: {name} for name in opened.specs}
    for alias, owner in opened.aliases.items():
        groups[owner].add(alias)
    assert {frozenset(names) for names in groups.values() if len(names) > 1} == folder.ties


@pytest.mark.parametrize("name", GOOD)
def test_ranges_are_those_of_the_whole(name, zero_folder):
    opened = zckpt.open(zero_folder(name).ckpt)
    for spec in opened.specs.values():
        whole = opened[spec.name].flatten()
        cuts = {0, 1, spec.numel // 3, spec.numel // 2, spec.numel - 1, spec.numel}
        for start, end in itertools.pairwise(sorted(cuts & {*range(spec.numel + 1)})):
            assert bits(opened.read(spec.name, start, end)) == bits(whole[start:end])
        if spec.shape and spec.shape[0] > 2:
            assert bits(opened.get_slice(spec.name)[1:-1]) == bits(opened[spec.name][1:-1])


def test_stage_0_gives_the_masters_in_the_order_of_the_parameters(zero_folder):
    folder = zero_folder("z0-w2-gpt2-bf16-0198")
    tree = torch.load(
        folder.ckpt / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False
    )
    (masters,) = tree["optimizer"]["fp32_groups"]
    names = [n for n in folder.facts["all_param_names"] if n != "lm_head.weight"]
    opened = zckpt.open(folder.ckpt)
    found = {name: opened[name] for name in opened.specs}
    assert wrong(found, dict(zip(names, [m.detach() for m in masters], strict=True))) == []


@pytest.mark.parametrize("name", GOOD)
def test_what_is_missing_is_said_and_nothing_else(name, zero_folder):
    folder = zero_folder(name)
    opened = zckpt.open(folder.ckpt)
    missing = folder.facts["expected_missing"]
    if name == "z2-w2-lora-excludefrozen-bf16-0198":  # not even their names are in it
        assert opened.missing == ()
        assert opened.lacks_frozen
    else:
        assert sorted(opened.missing) == sorted(missing)
        assert not opened.lacks_frozen
    assert bool(opened.notes) == bool(missing)
    assert not set(missing) & set(opened)


@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_lacks_parameters_is_not_converted_unasked(name, zero_folder, tmp_path):
    folder = zero_folder(name)
    with pytest.raises(MissingParametersError) as caught:
        zckpt.convert(folder.ckpt, tmp_path / "out")
    if not zckpt.open(folder.ckpt).lacks_frozen:
        assert f"lacks {len(folder.facts['expected_missing'])} parameters" in str(caught.value)
        assert folder.facts["expected_missing"][0] in str(caught.value)
    assert_nothing_is_left(tmp_path)


def test_allowing_other_names_is_not_enough(zero_folder, tmp_path):
    folder = zero_folder("z3-w2-frozen-bf16-083")
    with pytest.raises(MissingParametersError, match=r"lacks 1 parameters.*embed_tokens"):
        zckpt.convert(folder.ckpt, tmp_path / "out", allow_missing="*.layers.*")
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("name", GOOD)
def test_converted_it_is_what_safetensors_reads(name, zero_folder, tmp_path):
    folder = zero_folder(name)
    out = tmp_path / "out"
    report = zckpt.convert(folder.ckpt, out, max_shard_size=20_000, **INCOMPLETE.get(name, {}))
    tensors, metadata = stored(out)
    expected = folder.expected
    if folder.facts["stage"] == 0:
        tensors_16 = {n: t.bfloat16() for n, t in tensors.items()}
        assert wrong(tensors_16, {n: folder.live[n] for n in tensors}) == []
    else:
        assert wrong(tensors, {n: t for n, t in expected.items() if n in tensors}) == []
    ties = {}
    for alias, owner in report.aliases.items():
        ties.setdefault(owner, {owner}).add(alias)
    assert {frozenset(group) for group in ties.values()} == folder.ties
    assert {*tensors, *report.aliases} == set(expected)
    assert {n: metadata[n] for n in report.aliases} == report.aliases
    assert zckpt.verify(out).is_fine
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def value_from(folder, name):
    facts = folder.facts
    if name in folder.masters or facts["stage"] == 0:
        return "master"
    if facts["buffers"].get(name) or (name in facts["frozen_names"] and facts["stage"] == 1):
        return "live"
    is_empty = folder.expected[name].numel() == 0  # DeepSpeed lists those as frozen
    return "frozen" if name in facts["frozen_names"] or is_empty else "unowned"


@pytest.mark.parametrize("name", GOOD)
def test_the_manifest_says_where_values_are_from(name, zero_folder, tmp_path):
    folder = zero_folder(name)
    zckpt.convert(folder.ckpt, tmp_path / "out", **INCOMPLETE.get(name, {}))
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    facts, provenance = folder.facts, manifest["provenance"]
    latest = (folder.ckpt / "latest").read_text()
    assert provenance["source"] == "ZeRO folder"
    assert provenance["tag"] == latest
    assert provenance["global_step"] == int(latest.rpartition("-")[2].removeprefix("global_step"))
    assert provenance["zero_stage"] == facts["stage"]
    assert provenance["world_size"] == facts["world_size"]
    assert provenance["deepspeed_version"] == facts["deepspeed"].partition("+")[0]
    assert provenance["dtype"] is None
    found = {t["name"]: t["value_from"] for t in manifest["tensors"]}
    assert found == {n: value_from(folder, n) for n in found}
    trainable = {t["name"] for t in manifest["tensors"] if t["trainable"]}
    untrained = {*facts["frozen_names"], *facts["buffers"]}
    aliases = {alias for group in manifest["aliases"] for alias in group["aliases"]}
    empty = {n for n, t in folder.expected.items() if t.numel() == 0}
    assert trainable == set(folder.expected) - untrained - aliases - empty
    buffers = {t["name"] for t in manifest["tensors"] if t["role"] == "buffer"}
    assert buffers == {n for n, b in facts["buffers"].items() if b["persistent"]}
    left_out = sorted(left["name"] for left in manifest["left_out"])
    is_named = name != "z2-w2-lora-excludefrozen-bf16-0198"
    unnamed = ["(frozen parameters)"]
    assert left_out == (sorted(facts["expected_missing"]) if is_named else unnamed)
    assert all(any(n in warning for warning in manifest["warnings"]) for n in left_out)


@pytest.mark.parametrize("name", GOOD)
def test_cast_to_the_training_dtype_it_is_the_live_model(name, zero_folder, tmp_path):
    folder = zero_folder(name)
    dtype = folder.facts["precision"]
    zckpt.convert(folder.ckpt, tmp_path / "out", dtype=dtype, **INCOMPLETE.get(name, {}))
    opened = zckpt.open(tmp_path / "out")
    assert wrong(opened, folder.live) == []
    word = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    assert opened.manifest.provenance.dtype == word


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_dtype_is_for_parameters_frozen_ones_too_and_not_for_buffers(
    dtype, zero_folder, tmp_path
):
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for number, name in enumerate(("z3-w3-buffers-bf16-0198", "z3-w2-frozen-tied-bf16-0198")):
        folder = zero_folder(name)
        zckpt.convert(folder.ckpt, tmp_path / str(number), dtype=dtype)
        expected = {
            n: t if n in folder.facts["buffers"] else t.to(wanted)
            for n, t in folder.expected.items()
        }
        assert wrong(zckpt.open(tmp_path / str(number)), expected) == []


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_models_are_refused_by_what_they_are(name, zero_folder, tmp_path):
    folder = zero_folder(name)
    for call in (zckpt.open, lambda path: zckpt.convert(path, tmp_path / "out")):
        with pytest.raises(UnsupportedError, match=r"layer_0.*save_consolidated") as caught:
            call(folder.ckpt)
        assert ("pipeline" in name) == ("pipeline" in str(caught.value))
        assert ("moe" in name) == ("mixture-of-experts" in str(caught.value))
    assert_nothing_is_left(tmp_path)


# ------------------------------------------------------------------ options


def test_include_exclude_and_frozen_choose_by_name(zero_folder, tmp_path):
    folder = zero_folder("z3-w2-lora-bf16-0198")
    calls = {
        "lora": ({"include": "*lora_A*"}, lambda n: "lora_A" in n),
        "not": ({"exclude": ["*lora_*", "*norm*"]}, lambda n: "lora_" not in n and "norm" not in n),
        "both": (
            {"include": "*.q_proj.*", "exclude": "*lora_B*"},
            lambda n: ".q_proj." in n and "lora_B" not in n,
        ),
        "owned": ({"exclude_frozen": True}, lambda n: n in folder.masters),
    }
    for out, (options, is_wanted) in calls.items():
        report = zckpt.convert(folder.ckpt, tmp_path / out, **options)
        expected = {n: t for n, t in folder.expected.items() if is_wanted(n)}
        assert 0 < len(expected) < len(folder.expected)
        assert wrong(zckpt.open(tmp_path / out), expected) == []
        assert {left.name for left in report.left_out} == set(folder.expected) - set(expected)


def test_an_alias_whose_owner_is_not_asked_for_is_stored_itself(zero_folder, tmp_path):
    folder = zero_folder("z2-w2-gpt2-tied-fp16-0189")
    zckpt.convert(folder.ckpt, tmp_path / "out", exclude="transformer.wte.*")
    expected = {n: t for n, t in folder.expected.items() if "wte" not in n}
    assert "lm_head.weight" in expected
    assert wrong(stored(tmp_path / "out")[0], expected) == []


def test_a_pattern_that_matches_nothing_is_refused(zero_folder, tmp_path):
    with pytest.raises(UsageError, match="no tensor is left"):
        zckpt.convert(zero_folder(SMALL).ckpt, tmp_path / "out", include="nothing*")
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_any_number_of_threads_writes_the_same_bytes(jobs, zero_folder, tmp_path):
    for name in ("z3-w3-threegroups-sub300-bf16-0169", "z2-w3-roundrobin-decay-fp16-0198"):
        out = tmp_path / name
        zckpt.convert(zero_folder(name).ckpt, out, jobs=jobs, max_shard_size=9_000)
        assert len(list(out.glob("*.safetensors"))) > 2
        assert wrong(stored(out)[0], zero_folder(name).expected) == []


def test_without_digests_the_values_are_the_same(zero_folder, tmp_path):
    folder = zero_folder(SMALL)
    zckpt.convert(folder.ckpt, tmp_path / "out", digest=False)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert {tensor["digest"] for tensor in manifest["tensors"]} == {None}
    assert wrong(stored(tmp_path / "out")[0], folder.expected) == []
    assert zckpt.verify(tmp_path / "out").is_fine


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(zero_folder, tmp_path):
    folder = zero_folder("z3-w3-gpt2-tied-bf16-0198")
    planned = zckpt.convert(folder.ckpt, tmp_path / "out", dry_run=True, max_shard_size=20_000)
    assert_nothing_is_left(tmp_path)
    assert planned.manifest is None
    assert planned.estimated_s > 0
    zckpt.convert(folder.ckpt, tmp_path / "out", max_shard_size=20_000)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert planned.files == sizes
    files = sorted(folder.ckpt.glob("*/*optim_states.pt"))
    groups = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in files]
    records = [group["fp32_flat_groups"][0].untyped_storage().nbytes() for group in groups]
    assert planned.read_bytes == sum(records)
    # Of a record that is needed in part all is read, for its CRC-32.
    one = zckpt.convert(
        folder.ckpt, tmp_path / "out", dry_run=True, overwrite=True, include="*ln_f*"
    )
    assert one.read_bytes == sum(records)


def test_a_dry_run_says_that_the_disk_is_too_small(zero_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    folder = zero_folder("z3-w3-gpt2-tied-bf16-0198")
    planned = zckpt.convert(folder.ckpt, tmp_path / "out", dry_run=True)
    assert any("1,000 free" in note for note in planned.notes)
    with pytest.raises(NoSpaceError, match="1,000 free"):
        zckpt.convert(folder.ckpt, tmp_path / "out")


def test_frozen_parameters_without_names_need_a_pattern_for_everything(zero_folder, tmp_path):
    folder = zero_folder("z2-w2-lora-excludefrozen-bf16-0198")
    with pytest.raises(MissingParametersError, match=r"--allow-missing '\*'"):
        zckpt.convert(folder.ckpt, tmp_path / "out", allow_missing="base_model.*")
    report = zckpt.convert(folder.ckpt, tmp_path / "out", allow_missing="*")
    assert [left.name for left in report.left_out] == ["(frozen parameters)"]


def test_views_of_one_storage_are_read_and_checked(tmp_path):
    """Transposed, overlapping and shorter views, by many threads, and a flipped bit in each."""
    base = torch.arange(1_000_000, dtype=torch.float32)
    square = base.view(1000, 1000)
    module = {"a": square, "b": square.t(), "c": base[:700_000], "d": base[300_000:900_001]}
    folder = write_zero_folder(tmp_path / "zero", stage=0, world_size=1, groups=[{}])
    path = folder / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    torch.save(tree | {"module": module}, path)
    for turn in range(5):
        report = zckpt.convert(tmp_path / "zero", tmp_path / f"out{turn}", jobs=8)
        found = zckpt.open(report.path)
        assert all(torch.equal(found[name], tensor) for name, tensor in module.items())
    data = bytearray(path.read_bytes())
    where = data.index(base[650_000:650_004].numpy().tobytes())
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        zckpt.convert(tmp_path / "zero", tmp_path / "out")


def test_masters_of_several_groups_of_stage_0_are_not_guessed(tmp_path):
    one, two = torch.randn(3, 4), torch.randn(5)
    write_zero_folder(
        tmp_path / "zero", stage=0, world_size=1, groups=[{"a.weight": one}, {"b.bias": two}]
    )
    report = zckpt.convert(tmp_path / "zero", tmp_path / "out")
    assert any("fp32 masters" in note for note in report.notes)
    assert report.manifest.provenance.weights == "live"
    assert torch.equal(zckpt.open(tmp_path / "out")["a.weight"], one.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors", "model.pt"])
def test_a_file_s_name_is_refused_as_the_folder(name, zero_folder, tmp_path):
    with pytest.raises(UsageError, match=r"is the name of a file; name the folder .*/model'"):
        zckpt.convert(zero_folder(SMALL).ckpt, tmp_path / name)
    assert_nothing_is_left(tmp_path)


def test_assets_are_copied_beside_the_weights(zero_folder, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = zero_folder("z3-w2-hftrainer-bf16-0189")
    assert (folder.ckpt / "config.json").exists()
    report = zckpt.convert(folder.ckpt, tmp_path / "bare")
    assert any(str(folder.ckpt) in note and "--assets" in note for note in report.notes)
    zckpt.convert(folder.ckpt, tmp_path / "out", assets=folder.ckpt)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert isinstance(model.config, LlamaConfig)
    found = {n: t.detach() for n, t in model.state_dict().items()}
    assert wrong(found, folder.expected) == []


# ------------------------------------------------------------------ damaged folders

SAYS = {
    "bad-empty-tag": ["global_step3"],
    "bad-evil-os-system-model": ["zero_pp_rank_0_mp_rank_00_model_states.pt", "posix.system"],
    "bad-latest-dangling": ["global_step900", "global_step3"],
    "bad-latest-missing-two-tags": ["latest", "step-3 (step 3)", "step-5 (step 5)"],
    "bad-mixed-steps": ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "bad-z2-missing-optim-shard": ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "bad-z3-bitflip-master": ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "CRC-32"],
    "bad-z3-lfs-pointer-optim": [
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "Git LFS pointer",
    ],
    "bad-z3-missing-model-shard-frozen": ["zero_pp_rank_2_mp_rank_00_model_states.pt"],
    "bad-z3-shapes-do-not-fit": ["2927", "2980"],  # 8781 and 8940 elements on three ranks
    "bad-z3-stale-rank-from-bigger-world": [],
    "bad-z3-truncated-optim": ["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"],
}
"""What the error about each has to name: `must_name` of its expect.json, in words to search for."""

REFUSED = [name for name in SAYS if SAYS[name]]


def test_every_damaged_folder_has_its_words(zero_folder):
    assert sorted(SAYS) == DAMAGED
    for name, words in SAYS.items():
        outcome = zero_folder(name).expect["outcome"]
        assert outcome == "error" or "success" in outcome, name
        assert words or "success" in outcome, name


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_folder_is_refused_by_name(name, zero_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CorruptCheckpointError, NotACheckpointError)) as caught:
        zckpt.convert(zero_folder(name).ckpt, tmp_path / "out")
    assert [word for word in SAYS[name] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert_nothing_is_left(tmp_path)  # no sentinel of the hostile pickle either


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_there_stays_when_a_damaged_folder_is_refused(name, zero_folder, tmp_path):
    zckpt.convert(zero_folder(SMALL).ckpt, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ZckptError):
        zckpt.convert(zero_folder(name).ckpt, tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "name", ["bad-mixed-steps", "bad-z3-bitflip-master", "bad-evil-os-system-model"]
)
def test_the_shell_is_told_that_it_is_corrupt(name, zero_folder, tmp_path, monkeypatch, capsys):
    from zckpt.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(zero_folder(name).ckpt), "out"])
    assert caught.value.code == 3
    said = capsys.readouterr().err
    assert [word for word in SAYS[name] if word not in said] == []
    assert "Traceback" not in said
    assert_nothing_is_left(tmp_path)


def test_a_flipped_bit_is_found_in_records_that_are_needed_in_part(zero_folder, tmp_path):
    """The names asked for have no wrong value; the record that holds them has."""
    folder = zero_folder("bad-z3-bitflip-master")
    damaged = wrong(zckpt.open(folder.ckpt), folder.expected)
    assert 0 < len(damaged) < len(folder.expected)
    for name in set(folder.expected) - set(damaged):
        with pytest.raises(CorruptCheckpointError, match="zero_pp_rank_1"):
            zckpt.convert(folder.ckpt, tmp_path / "out", include=name)
        assert_nothing_is_left(tmp_path)


def test_files_of_a_bigger_world_are_named_and_not_used(zero_folder, tmp_path):
    folder = zero_folder("bad-z3-stale-rank-from-bigger-world")
    report = zckpt.convert(folder.ckpt, tmp_path / "out")
    assert wrong(zckpt.open(tmp_path / "out"), folder.expected) == []
    stale = {p.name for p in (folder.ckpt / "global_step3").glob("*pp_rank_3*")}
    assert len(stale) == 2
    warnings = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["warnings"]
    for notes in (report.notes, warnings, zckpt.open(folder.ckpt).notes):
        assert {name for name in stale if any(name in note for note in notes)} == stale


def test_a_global_that_is_allowed_is_read_past_and_not_called(zero_folder, tmp_path, monkeypatch):
    folder = zero_folder("bad-evil-os-system-model")
    monkeypatch.chdir(tmp_path)
    origin = zero_folder("z3-w3-gpt2-tied-bf16-0198")
    opened = zckpt.open(folder.ckpt, allow_global="posix.system")
    assert wrong(opened, origin.expected) == []
    zckpt.convert(folder.ckpt, "out", allow_global=["posix.system"])
    assert wrong(zckpt.open("out"), origin.expected) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UnsafePickleError):
        zckpt.open(folder.ckpt, allow_global="posix.*")


# ------------------------------------------------------------------ which tag


def test_two_tags_are_two_checkpoints(zero_folder, tmp_path):
    for name in (TWO_TAGS, "bad-latest-missing-two-tags"):
        folder = zero_folder(name)
        later = folder.expected_in("truth-step-5.safetensors")
        assert wrong(folder.expected, later) != []
        for tag, expected in (("step-3", folder.expected), ("step-5", later)):
            assert wrong(zckpt.open(folder.ckpt, tag=tag), expected) == []
            assert wrong(zckpt.open(folder.ckpt / tag), expected) == []
            out = tmp_path / name / tag
            report = zckpt.convert(folder.ckpt, out, tag=tag)
            assert wrong(zckpt.open(out), expected) == []
            assert (report.tag, report.source) == (tag, folder.ckpt / tag)
            provenance = json.loads((out / MANIFEST_NAME).read_text())["provenance"]
            assert (provenance["tag"], provenance["global_step"]) == (tag, int(tag[-1]))


def test_latest_counts_unless_there_is_a_tag(zero_folder):
    folder = zero_folder(TWO_TAGS)
    opened = zckpt.open(folder.ckpt)
    assert opened.tag == "step-3"
    assert opened.global_step == 3
    assert zckpt.open(folder.ckpt, tag="step-5").global_step == 5


@pytest.mark.parametrize(
    "text", ["global_step3\n", " global_step3\r\n", "global_step3/", "./global_step3"]
)
def test_latest_may_have_been_edited_by_hand(text, zero_folder, tmp_path):
    folder = zero_folder(SMALL)
    place = copied(folder, tmp_path / "ckpt")
    (place / "latest").write_bytes(text.encode())
    assert wrong(zckpt.open(place), folder.expected) == []


def test_the_only_tag_is_taken_with_a_notice(zero_folder, tmp_path):
    folder = zero_folder(SMALL)
    place = copied(folder, tmp_path / "ckpt")
    (place / "latest").unlink()
    (place / "runs").mkdir()
    report = zckpt.convert(place, tmp_path / "out")
    assert report.tag == "global_step3"
    assert wrong(zckpt.open(tmp_path / "out"), folder.expected) == []
    warnings = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["warnings"]
    for notes in (report.notes, warnings, zckpt.open(place).notes):
        assert any("latest" in note and "global_step3" in note for note in notes)


@pytest.mark.parametrize("tag", ["../other", "x/../../other", "ABSOLUTE", "..", "", "."])
def test_a_latest_that_points_outside_is_not_followed(tag, zero_folder, tmp_path):
    place = copied(zero_folder(SMALL), tmp_path / "ckpt")
    other = Path(shutil.copytree(place / "global_step3", tmp_path / "other"))
    assert len(zckpt.open(other)) > 0
    (place / "latest").write_text(str(other) if tag == "ABSOLUTE" else tag)
    with pytest.raises(NotACheckpointError, match="latest says"):
        zckpt.convert(place, tmp_path / "out")
    with pytest.raises(NotACheckpointError, match="tag="):
        zckpt.open(place, tag=str(other) if tag == "ABSOLUTE" else tag)
    assert not (tmp_path / "out").exists()


NONSENSE = {
    "no text": b"\xff\xfe\x00",
    "a zero byte": b"a\x00b",
    "a long name": b"a" * 300,
    "a long path": b"a/" * 5000,
    "two lines": b"tag\nglobal_step3",
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_in_latest_is_refused(text, zero_folder, tmp_path):
    place = copied(zero_folder(SMALL), tmp_path / "ckpt")
    (place / "latest").write_bytes(text)
    with pytest.raises(NotACheckpointError, match="latest says"):
        zckpt.open(place)


def test_a_tag_that_is_not_there_is_told_from_those_that_are(zero_folder):
    with pytest.raises(NotACheckpointError, match=r"step-4.*step-3, step-5"):
        zckpt.open(zero_folder(TWO_TAGS).ckpt, tag="step-4")


def test_tags_are_listed_in_the_order_of_their_steps(zero_folder, tmp_path):
    source = zero_folder(SMALL).ckpt / "global_step3"
    for number in (9, 100, 20):
        shutil.copytree(source, tmp_path / f"global_step{number}")
    with pytest.raises(NotACheckpointError) as caught:
        zckpt.open(tmp_path)
    positions = [str(caught.value).index(f"global_step{n} (step 3)") for n in (9, 20, 100)]
    assert positions == sorted(positions)
    assert "--tag global_step100" in str(caught.value)


def test_other_things_are_no_zero_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.pt").write_bytes(b"PK")
    for name in ("empty", "absent", "file.pt"):
        with pytest.raises(NotACheckpointError, match=name):
            zckpt.convert(tmp_path / name, tmp_path / "out")
        with pytest.raises((NotACheckpointError, CorruptCheckpointError), match=name):
            zckpt.open(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file.pt"]


def test_safetensors_are_meant_where_both_are_unless_there_is_a_tag(zero_folder, tmp_path):
    folder = zero_folder(SMALL)
    place = copied(folder, tmp_path / "ckpt")
    zckpt.convert(zero_folder("z2-w1-llama-tied-bf16-0169").ckpt, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        shutil.copy(path, place)
    assert "lm_head.weight" in zckpt.open(place)
    assert wrong(zckpt.open(place, tag="global_step3"), folder.expected) == []
    zckpt.convert(place, tmp_path / "zero")
    assert wrong(zckpt.open(tmp_path / "zero"), folder.expected) == []
