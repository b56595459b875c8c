"""Folders made without DeepSpeed are read by DeepSpeed, and look as if it had written them."""

import itertools
import pickletools
import runpy
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from zckpt.testing import models, run_ranks, torch_writer
from zckpt.testing.zero_folders import write_large_folder, write_zero_folder

SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (2, 3, 4), "e": (1,), "f": (11, 2), "g": (3,)}
NOTHING = {"z": (0, 3)}
NAN = float("nan")


def values(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def groups(shapes=SHAPES):
    """Two parameter groups, neither in the order of the names."""
    masters = values(shapes)
    names = list(masters)[::-1]
    return [{n: masters[n] for n in names[::2]}, {n: masters[n] for n in names[1::2]}]


def load(path):
    return torch.load(path, mmap=True, weights_only=False)


def convert(root):
    """What DeepSpeed's own converter makes of a folder."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(root)


def assert_converts_to(expected, root):
    found = convert(root)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value.to(found[name].dtype)), name


def assert_sound(folder):
    """Every file is a whole zip file, all of whose CRCs are right, and torch maps it."""
    for path in folder.iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert {name.split("/")[0] for name in archive.namelist()} == {path.stem}
        load(path)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("live_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sub_group_size", [None, 1, 9, 10_000])
def test_deepspeed_converts_stage_3(world_size, sub_group_size, live_dtype, tmp_path):
    frozen = {name: t.to(live_dtype) for name, t in values({"h": (3, 3), "i": ()}, 1).items()}
    first, second = groups(SHAPES | NOTHING)
    folder = write_zero_folder(
        tmp_path,
        stage=3,
        world_size=world_size,
        groups=[first, second],
        frozen=frozen,
        unowned=values({"lost": (4,)}),
        buffers={"count": torch.arange(3)},
        aliases={"a2": "a", "h2": "h"},
        live_dtype=live_dtype,
        sub_group_size=sub_group_size,
        padding=NAN,
    )
    expected = {**first, **second, **frozen, "count": torch.arange(3)}
    assert_converts_to(expected | {"a2": expected["a"], "h2": frozen["h"]}, tmp_path)
    assert_sound(folder)


@pytest.mark.parametrize("live_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_converts_stages_1_and_2(stage, world_size, live_dtype, tmp_path):
    frozen = {name: t.to(live_dtype) for name, t in values({"h": (3, 3), "i": ()}, 1).items()}
    first, second = groups()
    expected = {**first, **second, "count": torch.arange(3), "a2": {**first, **second}["a"]}
    for round_robin, aligns_parameters in itertools.product([False, True], repeat=2):
        root = tmp_path / f"{round_robin}-{aligns_parameters}"
        folder = write_zero_folder(
            root,
            stage=stage,
            world_size=world_size,
            groups=[first, second],
            frozen=frozen,
            buffers={"count": torch.arange(3)},
            aliases={"a2": "a", "h2": "h"},
            live_dtype=live_dtype,
            round_robin=round_robin,
            aligns_parameters=aligns_parameters,
            padding=NAN,
        )
        # The converter knows nothing of what stage 1 does not train.
        extra = {**frozen, "h2": frozen["h"]} if stage == 2 else {}
        assert_converts_to(expected | extra, root)
        assert_sound(folder)


def test_round_robin_deals_parameters_in_turn(tmp_path):
    folder = write_zero_folder(
        tmp_path, stage=2, world_size=2, groups=[values(SHAPES)], round_robin=True
    )
    (shapes,) = load(folder / "mp_rank_00_model_states.pt")["param_shapes"]
    assert "".join(shapes) == "acegbdf"


def test_a_rank_may_hold_nothing_but_padding(tmp_path):
    for bf16_optimizer in (False, True):
        folder = write_zero_folder(
            tmp_path,
            stage=1,
            world_size=4,
            groups=[{"a": torch.ones(3)}],
            bf16_optimizer=bf16_optimizer,
            padding=NAN,
        )
        states = [
            load(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            for rank in range(4)
        ]
        masters = [s["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] for s in states]
        paddings = [s["optimizer_state_dict"]["group_paddings"][0] for s in states]
        assert [len(master) for master in masters] == ([2] * 4 if bf16_optimizer else [2, 1, 0, 0])
        assert paddings == ([0, 0, 0, 5] if bf16_optimizer else [0, 1, 2, 2])
        assert torch.equal(torch.cat(masters)[:3], torch.ones(3))
        assert [len(m.untyped_storage()) for m in masters] == [8] * 4
        assert_sound(folder)


def test_stage_0_holds_masters_in_the_model_file(tmp_path):
    first, second = groups()
    folder = write_zero_folder(tmp_path, stage=0, world_size=2, groups=[first, second])
    (path,) = folder.iterdir()
    tree = load(path)
    found = tree["optimizer"]["fp32_groups"]
    for group, tensors in zip([first, second], found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group.values(), tensors, strict=True))
    assert torch.equal(tree["module"]["a"], (first | second)["a"].bfloat16())


def test_live_weights_share_the_flat_buffer_and_aliases_their_owner(tmp_path):
    folder = write_zero_folder(
        tmp_path,
        stage=2,
        world_size=2,
        groups=[values(SHAPES)],
        aliases={"a2": "a"},
        unlisted_aliases={"b2": "b"},
        names=["b2", "a2", *SHAPES],
    )
    tree = load(folder / "mp_rank_00_model_states.pt")
    module = tree["module"]
    assert list(module) == ["b2", "a2", *SHAPES]
    assert len({tensor.untyped_storage().data_ptr() for tensor in module.values()}) == 1
    assert module["a2"].storage_offset() == module["a"].storage_offset()
    assert module["b2"].storage_offset() == module["b"].storage_offset()
    assert tree["shared_params"] == {"a2": "a"}


def test_there_is_no_stage_4(tmp_path):
    with pytest.raises(ValueError, match="no ZeRO stage 4"):
        write_zero_folder(tmp_path, stage=4, world_size=1, groups=[values(SHAPES)])


# ------------------------------------------------------------------ large folders


@pytest.mark.parametrize("fill", ["zeros", "random"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_converts_large_folders(stage, fill, tmp_path):
    folder = write_large_folder(
        tmp_path,
        SHAPES,
        stage=stage,
        world_size=3,
        frozen={"h": (3, 3)},
        aliases={"a2": "a"},
        sub_group_size=9,
        fill=fill,
        moments=fill,
    )
    expected = {**SHAPES, "a2": SHAPES["a"]} | ({"h": (3, 3)} if stage > 1 else {})
    found = convert(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    numbers = torch.cat([found[name].flatten() for name in SHAPES])
    assert numbers.isfinite().all()
    assert len(numbers.unique()) == (1 if fill == "zeros" else len(numbers))
    assert torch.equal(found["a2"], found["a"])
    assert_sound(folder)


def test_large_folders_are_laid_out_as_small_ones(tmp_path):
    for stage in range(4):
        settings = {"stage": stage, "world_size": 3, "aliases": {"a2": "a"}, "sub_group_size": 9}
        small = write_zero_folder(tmp_path / "small", groups=[values(SHAPES)], **settings)
        large = write_large_folder(tmp_path / "large", SHAPES, **settings)
        assert structures(small) == structures(large)


def test_moments_may_be_left_out_or_be_holes(tmp_path):
    def moments(kind):
        folder = write_large_folder(
            tmp_path / str(kind), SHAPES, world_size=1, fill="random", moments=kind
        )
        tree = load(folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
        return tree["optimizer_state_dict"]["optimizer_state_dict"]["state"]

    assert moments(None) == {}
    assert moments("zeros")[0]["exp_avg"].count_nonzero() == 0
    assert moments("zeros")[0]["step"] == 3
    assert moments("random")[0]["exp_avg_sq"].count_nonzero() > 0


def test_noise_depends_on_the_seed_alone(tmp_path):
    def convert_with(seed, name):
        write_large_folder(tmp_path / name, SHAPES, world_size=2, fill="random", seed=seed)
        return convert(tmp_path / name)["f"]

    assert torch.equal(convert_with(1, "a"), convert_with(1, "b"))
    assert not torch.equal(convert_with(1, "a"), convert_with(2, "c"))


def test_files_of_a_405b_rank_are_holes(tmp_path):
    # Two ranks, each with the file that one of 1,024 would have.
    shapes = {f"layers.{layer}": (32, 1_511_936) for layer in range(16)}
    folder = write_large_folder(tmp_path, shapes, world_size=2)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert path.stat().st_size > 4 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    (flat,) = load(path)["optimizer_state_dict"]["fp32_flat_groups"]
    assert flat.numel() == 16 * 16 * 1_511_936
    assert flat[-1] == 0


# ------------------------------------------------------------------ files of torch


def test_files_are_those_of_torch_save_byte_by_byte(tmp_path):
    tensor = torch.randn(100)
    vars(tensor)["ds_id"] = "0_1"
    matrix = torch.randn(7, 3).bfloat16()
    empty = torch.empty(0)
    tree = {
        "views": [tensor, tensor[3:10], matrix, matrix.T],
        "empty": [empty, empty.detach(), torch.empty(0)],
        "ordered": OrderedDict(shape=torch.Size([2, 3]), scalar=torch.tensor(3.0)),
        "others": [torch.arange(5), torch.tensor([True]), torch.ones(2, requires_grad=True)],
        "plain": (1, 2.5, None, "text"),
    }
    ours, theirs = tmp_path / "ours" / "file.pt", tmp_path / "file.pt"
    ours.parent.mkdir()
    torch_writer.write_torch_file(ours, tree, torch_writer.zeros)
    torch.save(tree, theirs)
    with zipfile.ZipFile(theirs) as archive:
        serialization_id = archive.read("file/.data/serialization_id")
        crc = zlib.crc32(serialization_id).to_bytes(4, "little")
    expected = theirs.read_bytes().replace(serialization_id, b"0" * 40)
    expected = expected.replace(crc, zlib.crc32(b"0" * 40).to_bytes(4, "little"))
    assert ours.read_bytes() == expected


def test_records_beyond_4_gib(tmp_path):
    path = tmp_path / "large.pt"
    holes = [torch.empty(numel, device="meta") for numel in ((1 << 30) + 5, 3, (1 << 30) + 7)]
    held = torch.arange(5)
    torch_writer.write_torch_file(path, [*holes, held], torch_writer.zeros)
    *found, found_held = load(path)
    assert [tensor.numel() for tensor in found] == [tensor.numel() for tensor in holes]
    assert torch.equal(found_held, held)
    with zipfile.ZipFile(path) as archive:
        sizes = [archive.getinfo(f"large/data/{key}").file_size for key in range(4)]
        assert archive.read("large/data/3") == held.numpy().tobytes()
    assert sizes == [(4 << 30) + 20, 12, (4 << 30) + 28, 40]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1023, 1024, 1_000_001])
def test_crc_of_zeros(size):
    assert torch_writer.crc32_of_zeros(size) == zlib.crc32(bytes(size))


# ------------------------------------------------------------------ against a real engine

ENGINES = {
    "unfused": {"stage": 0},
    "stage-1": {"stage": 1},
    "bf16-optimizer": {"stage": 1, "bf16_optimizer": True},
    "stage-2": {"stage": 2, "round_robin": True},
    "aligned": {"stage": 2, "aligns_parameters": True},
    "stage-3": {"stage": 3, "sub_group_size": 500},
    "fp32": {"stage": 3, "sub_group_size": 500, "live_dtype": torch.float32},
}
"""Settings of `write_zero_folder`, each for an engine that would write such a folder."""

DS_NAMES = {
    "round_robin": "round_robin_gradients",
    "aligns_parameters": "parameter_alignment",
    "sub_group_size": "sub_group_size",
}


def save(out):
    """Train and save with each engine in turn; on each rank."""
    for name, settings in ENGINES.items():
        dtype = "fp32" if "live_dtype" in settings else "bf16"
        zero = {ds: settings[ours] for ours, ds in DS_NAMES.items() if ours in settings}
        config = models.ds_config(stage=settings["stage"], dtype=dtype, zero=zero)
        if "bf16_optimizer" in settings:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        engine = models.make_engine(models.build("frozen"), config)
        models.train(engine, range(1))
        engine.save_checkpoint(f"{out}/{name}", client_state={"mine": [1]})
        engine.destroy()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    out = tmp_path_factory.mktemp("real")
    run_ranks(save, 2, str(out))
    return out


@pytest.mark.ranks
@pytest.mark.engine
@pytest.mark.parametrize("name", ENGINES)
def test_files_look_as_if_an_engine_had_written_them(name, real, tmp_path):
    import deepspeed

    model = models.build("frozen")
    own = {n: p.detach() for n, p in model.named_parameters()}
    trained = {n: p for n, p in own.items() if model.get_parameter(n).requires_grad}
    written = write_zero_folder(
        tmp_path,
        tag="global_step1",
        world_size=2,
        groups=[trained],
        frozen={n: p for n, p in own.items() if n not in trained},
        aliases={"lm_head.weight": "transformer.wte.weight"},
        names=list(model.state_dict()),
        global_steps=1,
        ds_version=deepspeed.__version__,
        client_state={"mine": [1]},
        **ENGINES[name],
    )
    assert structures(written) == structures(real / name / "global_step1")
    assert (tmp_path / "latest").read_bytes() == (real / name / "latest").read_bytes()


def structures(folder):
    """Everything about the files but the values of tensors and the configuration."""
    return {
        path.name: (named_classes(path), structure(load(path), {})) for path in folder.iterdir()
    }


def named_classes(path):
    with zipfile.ZipFile(path) as archive:
        data = archive.read(f"{path.stem}/data.pkl")
    return {argument for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}


def structure(tree, storages):
    """A tree of the same form whose leaves say what is there."""
    if isinstance(tree, torch.Tensor):
        storage = tree.untyped_storage()
        key = storage._cdata if storage.nbytes() else None  # of no bytes: shared or not, no matter
        number = storages.setdefault(key, len(storages))
        view = (tree.shape, tree.stride(), tree.storage_offset(), storage.nbytes(), number)
        return (*view, tree.dtype, tree.requires_grad, sorted(vars(tree)))
    if isinstance(tree, dict):
        items = [(k, structure(v, storages)) for k, v in tree.items() if k != "ds_config"]
        return type(tree), items
    if isinstance(tree, list | tuple):
        return type(tree), [structure(item, storages) for item in tree]
    if type(tree).__module__.startswith("deepspeed"):
        return type(tree).__name__, str(vars(tree))
    return tree


# ------------------------------------------------------------------ the script


def test_script_writes_a_tied_model(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "scripts" / "make_zero_folder.py"
    arguments = [str(tmp_path), "--config", "tiny", "--ranks", "3", "--sparse-moments"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    assert "156,928 parameters in 20 tensors" in capsys.readouterr().out
    found = convert(tmp_path)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert len(found) == 21
