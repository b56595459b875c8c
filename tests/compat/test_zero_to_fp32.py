"""The drop-in gives what DeepSpeed's own module gives, and does right where that does not."""

import importlib
import inspect
import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from zckpt import errors
from zckpt.compat import zero_to_fp32 as ours
from zckpt.sources.zero import ZeroFolder
from zckpt.testing import models, run_ranks

TIED = "z3-w2-llama-tied-fp16-0198"
GPT2 = "z2-w2-gpt2-tied-fp16-0189"
BUFFERS = "z3-w3-buffers-bf16-0198"
FROZEN = "z3-w2-frozen-tied-bf16-0198"
NO_FROZEN = "z2-w2-lora-excludefrozen-bf16-0198"
UNOWNED = "z3-w2-lora-unowned-base-bf16-0189"
COMPILED = "z2-w2-compile-prefix-bf16-0145"
DAMAGED = "bad-z3-bitflip-master"

RIGHT = [TIED, GPT2, BUFFERS, FROZEN, COMPILED, "z2-w3-roundrobin-decay-fp16-0198"]
RIGHT += ["z3-w4-shapes-frozen-bf16-0189", "z3-w12-gpt2-bf16-0198"]
"""Folders of which DeepSpeed's module makes what was trained."""

SIGNATURES = [
    "get_fp32_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "get_checkpoint_files",
]


@pytest.fixture(scope="module")
def stock():
    from deepspeed.utils import zero_to_fp32

    return zero_to_fp32


def assert_same(found, expected):
    """Names, dtypes, values and what is one object with what."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert ties(found) == ties(expected)


def ties(state_dict):
    names = {}
    for name, value in state_dict.items():
        names.setdefault(id(value), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def module_of(values):
    """A module whose state dict has these names, all zeros."""
    root = nn.Module()
    for name, value in values.items():
        *path, last = name.split(".")
        node = root
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, nn.Module())
            node = getattr(node, part)
        node.register_buffer(last, torch.zeros_like(value))
    return root


# ------------------------------------------------------------------ the same as DeepSpeed's


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_the_same(stock, name):
    found, expected = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(module, name)).parameters.values()
        ]
        for module in (ours, stock)
    )
    assert found == expected


@pytest.mark.parametrize("exclude_frozen", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_the_state_dict_is_the_same(stock, zero_folder, name, exclude_frozen):
    folder = zero_folder(name).ckpt
    asked = {"exclude_frozen_parameters": exclude_frozen}
    expected = stock.get_fp32_state_dict_from_zero_checkpoint(str(folder), **asked)
    if name == BUFFERS:
        assert {v.dtype for v in expected.values()} > {torch.int64, torch.bool}
    for place in (folder, str(folder), next(path for path in folder.iterdir() if path.is_dir())):
        assert_same(ours.get_fp32_state_dict_from_zero_checkpoint(place, **asked), expected)


@pytest.mark.parametrize(
    "name, dtype, small",
    [(TIED, "fp32", 8000), (BUFFERS, "torch.bfloat16", 1000), (FROZEN, torch.float16, 4000)],
)
def test_bin_files_are_the_same(stock, zero_folder, tmp_path, *, name, dtype, small):
    """One file, and several with their index."""
    for size in ("5GB", small, None):
        outs = [tmp_path / f"{who}-{size}" for who in ("ours", "theirs")]
        for module, out in zip((ours, stock), outs, strict=True):
            module.convert_zero_checkpoint_to_state_dict(
                str(zero_folder(name).ckpt), str(out), dtype=dtype, max_shard_size=size
            )
        names = [sorted(path.name for path in out.iterdir()) for out in outs]
        assert names[0] == names[1]
        assert (len(names[0]) > 2) == (size == small)
        for file in names[0]:
            found, expected = (out / file for out in outs)
            if file.endswith(".json"):
                assert found.read_bytes() == expected.read_bytes()
            else:
                assert_same(torch.load(found), torch.load(expected))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_files_are_found_in_the_same_way(stock, zero_folder, tmp_path, zero_stage):
    folder = zero_folder({2: GPT2, 3: "z3-w12-gpt2-bf16-0198"}[zero_stage]).ckpt / "global_step3"
    assert folder.is_dir()
    assert ours.get_optim_files(folder) == stock.get_optim_files(folder)
    assert ours.get_model_state_files(folder) == stock.get_model_state_files(folder)
    found = ours.get_model_state_file(folder, zero_stage)
    assert found == stock.get_model_state_file(folder, zero_stage)
    for call in (ours.get_optim_files, lambda place: ours.get_model_state_file(place, zero_stage)):
        with pytest.raises(FileNotFoundError):
            call(tmp_path)


def test_a_lazy_state_dict_reads_when_asked(stock, zero_folder, monkeypatch):
    folder = zero_folder(BUFFERS).ckpt
    reads = []
    read = ZeroFolder.read
    monkeypatch.setattr(ZeroFolder, "read", lambda *args: reads.append(args[1]) or read(*args))
    lazy = ours.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    expected = stock.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    empty = ours.to_torch_tensor(lazy, return_empty_tensor=True, dtype="bf16")
    assert reads == []
    assert ties(lazy) == ties(empty) == ties(expected)
    for name, value in expected.items():
        assert (lazy[name].shape, lazy[name].dtype) == (value.shape, value.dtype)
        assert empty[name].shape == value.shape
        assert empty[name].dtype == (torch.bfloat16 if value.is_floating_point() else value.dtype)
    assert_same(ours.to_torch_tensor(lazy), expected)
    assert len(reads) == len(set(reads)) == len({id(value) for value in lazy.values()})


# ------------------------------------------------------------------ right where DeepSpeed's is not


@pytest.mark.parametrize(
    "name",
    [
        "z1-w2-bf16opt-tied-0189",
        "z1-w2-frozen-bf16-0198",
        "z1-w2-gpt2-tied-fp32-083",
        "z2-w2-clientstate-class-bf16-0169",
        "z2-w2-lora-unowned-base-bf16-0198",
        "z2-w2-shapes-empty-bf16-0198",
        "z2-w2-sharedmodule-bf16-0198",
    ],
)
def test_what_was_trained_is_there(zero_folder, name):
    folder = zero_folder(name)
    found = ours.get_fp32_state_dict_from_zero_checkpoint(folder.ckpt)
    assert sorted(found) == sorted(folder.expected)
    for key, value in folder.expected.items():
        assert torch.equal(found[key], value), key
    assert ties(found) == folder.ties


@pytest.mark.parametrize("name", [UNOWNED, NO_FROZEN, "z3-w2-frozen-bf16-083"])
def test_missing_parameters_are_an_error_unless_left_out(zero_folder, tmp_path, name):
    folder = zero_folder(name)
    for call in (
        ours.get_fp32_state_dict_from_zero_checkpoint,
        lambda place: ours.get_fp32_state_dict_from_zero_checkpoint(place, lazy_mode=True),
        lambda place: ours.convert_zero_checkpoint_to_fp32_state_dict(place, tmp_path / "out"),
    ):
        with pytest.raises(errors.MissingParametersError, match="exclude_frozen_parameters"):
            call(folder.ckpt)
    assert list(tmp_path.iterdir()) == []
    found = ours.get_fp32_state_dict_from_zero_checkpoint(
        folder.ckpt, exclude_frozen_parameters=True
    )
    assert set(found) == folder.masters


def test_a_damaged_folder_is_an_error(zero_folder, tmp_path):
    folder = zero_folder(DAMAGED).ckpt
    with pytest.raises(errors.CorruptCheckpointError, match="pp_rank_1"):
        ours.get_fp32_state_dict_from_zero_checkpoint(folder)
    for safe in (False, True):
        with pytest.raises(errors.CorruptCheckpointError, match="pp_rank_1"):
            ours.convert_zero_checkpoint_to_state_dict(
                folder, tmp_path / "a" / "out", safe_serialization=safe
            )
        assert not (tmp_path / "a" / "out").exists()


def test_nothing_in_a_folder_is_run(zero_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UnsafePickleError, match=r"posix\.system"):
        ours.get_fp32_state_dict_from_zero_checkpoint(zero_folder("bad-evil-os-system-model").ckpt)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("size", ["5GB", 1000])
@pytest.mark.parametrize("name", [TIED, BUFFERS, FROZEN, COMPILED])
def test_tied_tensors_go_into_safetensors_once(zero_folder, tmp_path, name, size):
    folder = zero_folder(name).ckpt
    ours.convert_zero_checkpoint_to_fp32_state_dict(
        folder, tmp_path, max_shard_size=size, safe_serialization=True
    )
    expected = ours.get_fp32_state_dict_from_zero_checkpoint(folder)
    files = sorted(tmp_path.glob("model*.safetensors"))
    assert (len(files) > 1) == (size == 1000)
    found, aliases, places = {}, {}, {}
    for file in files:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        assert metadata.pop("format") == "pt"
        aliases |= metadata
        values = load_file(file)
        places |= dict.fromkeys(values, file.name)
        found |= values
    assert not found.keys() & aliases.keys()
    found |= {alias: found[owner] for alias, owner in aliases.items()}
    assert ties(found) == ties(expected)
    for key, value in expected.items():
        assert found[key].dtype == (torch.float32 if value.is_floating_point() else value.dtype)
        assert torch.equal(found[key], value.to(found[key].dtype)), key
    if size == 1000:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
        assert index["weight_map"] == places
        assert index["metadata"]["total_size"] == sum(found[n].nbytes for n in places)


@pytest.mark.parametrize("safe", [False, True])
def test_what_is_in_the_folder_stays_until_all_is_complete(
    zero_folder, tmp_path, monkeypatch, caplog, safe
):
    mine = tmp_path / "README.md"
    mine.write_text("mine")

    def convert(name, size="5GB"):
        ours.convert_zero_checkpoint_to_fp32_state_dict(
            zero_folder(name).ckpt, tmp_path, max_shard_size=size, safe_serialization=safe
        )
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    weights = "model.safetensors" if safe else "pytorch_model.bin"
    before = convert(GPT2)
    assert before.keys() == {"README.md", weights}
    with pytest.raises(errors.CorruptCheckpointError):
        convert(DAMAGED, 6000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(TIED)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    after = convert(TIED)
    assert after.keys() == before.keys()
    assert after[weights] != before[weights]
    assert caplog.text == ""
    sharded = convert(TIED, 6000)
    assert sharded.keys() > before.keys()
    assert f"also holds weights from before: {weights}" in caplog.text


def interrupt(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"dtype": "int8"}, ValueError),
        ({"dtype": torch.float64}, ValueError),
        ({"max_shard_size": "huge"}, ValueError),
        ({"max_shard_size": "huge", "safe_serialization": True}, ValueError),
        ({"tag": "nonsense"}, FileNotFoundError),
        ({"tag": "../elsewhere"}, FileNotFoundError),
    ],
)
def test_what_cannot_be_done_leaves_nothing(zero_folder, tmp_path, options, kind):
    with pytest.raises(kind) as raised:
        ours.convert_zero_checkpoint_to_state_dict(
            zero_folder(TIED).ckpt, tmp_path / "out", **options
        )
    assert isinstance(raised.value, errors.ZckptError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_to_write_into(zero_folder, tmp_path):
    file = tmp_path / "pytorch_model.bin"
    file.touch()
    with pytest.raises(FileExistsError, match="is a file"):
        ours.convert_zero_checkpoint_to_fp32_state_dict(zero_folder(TIED).ckpt, file)


# ------------------------------------------------------------------ into a model


def test_a_model_is_loaded(zero_folder, caplog):
    folder = zero_folder(TIED)
    model = module_of(folder.expected)
    assert ours.load_state_dict_from_zero_checkpoint(model, folder.ckpt) is model
    for name, value in folder.expected.items():
        assert torch.equal(model.state_dict()[name], value)
    assert caplog.text == ""


def test_what_only_one_side_has_is_logged(zero_folder, caplog):
    """A folder without its frozen parameters leaves those of the model as they are."""
    folder = zero_folder(NO_FROZEN)
    first, *others = sorted(folder.expected)
    model = module_of({first: folder.expected[first], "frozen": torch.zeros(3)})
    with caplog.at_level(logging.WARNING, "zckpt"):
        ours.load_state_dict_from_zero_checkpoint(model, folder.ckpt)
    assert torch.equal(model.state_dict()[first], folder.expected[first])
    assert "has no values for frozen" in caplog.text
    assert "the model has no place for " in caplog.text
    assert all(name in caplog.text for name in others)


def test_a_model_of_other_names_is_an_error(zero_folder):
    with pytest.raises(errors.SpecMismatchError, match="no name in common"):
        ours.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), zero_folder(TIED).ckpt)
    with pytest.raises(errors.MissingParametersError):
        ours.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), zero_folder(UNOWNED).ckpt)


# ------------------------------------------------------------------ the command line


def test_the_command_line(zero_folder, tmp_path, capsys):
    folder = str(zero_folder("z3-w2-twotags-latest-older-bf16-0198").ckpt)
    ours.main([folder, f"{tmp_path}/one"])
    ours.main([folder, f"{tmp_path}/many", "--safe_serialization", "--max_shard_size", "20KB"])
    ours.main([folder, f"{tmp_path}/other", "-t", "step-5", "--exclude_frozen_parameters", "-d"])
    expected = {
        tag: ours.get_fp32_state_dict_from_zero_checkpoint(folder, tag) for tag in (None, "step-5")
    }
    assert_same(torch.load(tmp_path / "one" / "pytorch_model.bin"), expected[None])
    assert_same(torch.load(tmp_path / "other" / "pytorch_model.bin"), expected["step-5"])
    assert len(list((tmp_path / "many").glob("model-0000?-of-0000?.safetensors"))) > 1
    assert capsys.readouterr() == ("", "")


def test_the_command_line_fails_in_one_line(zero_folder, tmp_path, capsys):
    line = [str(zero_folder(DAMAGED).ckpt), f"{tmp_path}/out"]
    with pytest.raises(SystemExit, match=r"^error: .*pp_rank_1.*damaged"):
        ours.main(line)
    with pytest.raises(errors.CorruptCheckpointError):
        ours.main([*line, "--debug"])
    assert list(tmp_path.iterdir()) == []


def test_python_m_runs_it(zero_folder, tmp_path):
    line = [sys.executable, "-m", "zckpt.compat.zero_to_fp32", zero_folder(TIED).ckpt, tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


# ------------------------------------------------------------------ callers of DeepSpeed's module


@pytest.fixture
def in_its_place(stock, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", ours)
    monkeypatch.setattr("deepspeed.utils.zero_to_fp32", ours)


def test_deepspeeds_other_script_runs_on_it(in_its_place, zero_folder, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed.utils.zero_to_torch", raising=False)
    script = pytest.importorskip("deepspeed.utils.zero_to_torch")
    assert script.zero_to_fp32 is ours
    line = [str(zero_folder(TIED).ckpt), str(tmp_path), "--dtype", "bf16", "--safe_serialization"]
    script.main(line)
    expected = {n: v.bfloat16() for n, v in zero_folder(TIED).expected.items()}
    del expected["lm_head.weight"]
    assert_same(load_file(tmp_path / "model.safetensors"), expected)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_converts_with_it(in_its_place, zero_folder, tmp_path, package):
    pytest.importorskip(package)
    module = importlib.import_module(f"{package}.utilities.deepspeed")
    for name in (TIED, GPT2):
        folder, out = zero_folder(name), tmp_path / name
        module.convert_zero_checkpoint_to_fp32_state_dict(str(folder.ckpt), str(out))
        found = torch.load(out, weights_only=False)["state_dict"]
        assert sorted(found) == sorted(folder.expected)
        assert all(torch.equal(found[n], value) for n, value in folder.expected.items())


def load_without_optimizer(out):
    """What an engine has after it loaded weights alone, by DeepSpeed's module and by ours."""
    import deepspeed.runtime.engine

    engine = models.make_engine(models.build("gpt2"), models.ds_config())
    models.train(engine, range(2))
    engine.save_checkpoint(out)
    trained = models.truth(engine.module)
    loaded = []
    for module in (None, ours):
        if module is not None:
            function = module.get_fp32_state_dict_from_zero_checkpoint
            deepspeed.runtime.engine.get_fp32_state_dict_from_zero_checkpoint = function
        models.train(engine, range(2))
        engine.load_checkpoint(out, load_optimizer_states=False)
        loaded.append(models.truth(engine.module))
    return trained, *loaded


@pytest.mark.ranks
@pytest.mark.engine
def test_an_engine_loads_weights_with_it(tmp_path):
    for trained, theirs, found in run_ranks(load_without_optimizer, 2, str(tmp_path)):
        assert all(torch.equal(theirs[n], value) for n, value in trained.items())
        assert all(torch.equal(found[n], value) for n, value in trained.items())
