"""A ZeRO folder of a real engine converts to the very files that a save of that engine writes."""

import pytest
import torch

import zckpt
from zckpt.testing import models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]

STAGES = [
    ("gpt2", {"stage": 0}),
    ("gpt2", {"stage": 1}),
    ("odd", {"stage": 2}),
    ("frozen", {"stage": 2}),
    ("gpt2", {"stage": 2, "dtype": "fp32"}),
    ("llama_tied", {"stage": 2, "zero": {"round_robin_gradients": True}}),
    ("gpt2", {"stage": 2, "zero": {"parameter_alignment": True}}),
    ("gpt2", {"zero": {"sub_group_size": 700}}),
    ("gpt2", {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}),
]
MODELS = ["llama", "t5", "bert", "odd", "frozen", "checkpointed"]


def save_every_way(name, zero, out):
    """Train, then save the same step: live, masters, and DeepSpeed's own way."""
    engine = models.make_engine(models.build(name), models.ds_config(**zero))
    models.train(engine, range(3))
    zckpt.save_consolidated(engine, f"{out}/live", max_shard_size=4000)
    zckpt.save_consolidated(engine, f"{out}/masters", weights="master", max_shard_size=4000)
    engine.save_checkpoint(f"{out}/zero")


@pytest.mark.parametrize("name, zero", [*STAGES, *((name, {}) for name in MODELS)], ids=str)
def test_converted_is_what_a_save_would_have_written(name, zero, tmp_path):
    run_ranks(save_every_way, 2, name, zero, str(tmp_path))
    live_dtype = zero.get("dtype", "bf16")
    for dtype, saved in ((live_dtype, "live"), ("keep", "masters")):
        out = tmp_path / f"converted-{dtype}"
        zckpt.convert(tmp_path / "zero", out, dtype=dtype, max_shard_size=4000)
        expected = {p.name: p for p in (tmp_path / saved).glob("model*")}
        assert {p.name for p in out.glob("model*")} == set(expected)
        assert len(expected) > 2
        for file, path in expected.items():
            assert (out / file).read_bytes() == path.read_bytes(), file
        ours, theirs = zckpt.open(out).manifest, zckpt.open(tmp_path / saved).manifest
        assert ours.aliases == theirs.aliases
        assert [t.digest for t in ours.tensors] == [t.digest for t in theirs.tensors]
        assert [t.role for t in ours.tensors] == [t.role for t in theirs.tensors]
        assert ours.provenance.global_step == theirs.provenance.global_step == 3
        assert zckpt.verify(out).is_fine


def save_unowned(out):
    """Train a part of a model with the engine's optimizer and the rest beside it."""
    model = models.build("llama")
    owned = [p for name, p in model.named_parameters() if "layers.1" in name]
    optimizer = torch.optim.AdamW(owned, lr=1e-3)
    engine = models.make_engine(model, models.ds_config(), optimizer)
    models.train(engine, range(1))
    engine.save_checkpoint(f"{out}/zero")


def test_what_deepspeed_did_not_save_is_missed_by_name(tmp_path):
    run_ranks(save_unowned, 2, str(tmp_path))
    with pytest.raises(zckpt.errors.MissingParametersError, match=r"model\.embed_tokens\.weight"):
        zckpt.convert(tmp_path / "zero", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    everything_else = ["model.embed_tokens.*", "lm_head.*", "model.norm.*", "model.layers.0.*"]
    report = zckpt.convert(tmp_path / "zero", tmp_path / "out", allow_missing=everything_else)
    assert set(zckpt.open(tmp_path / "out")) == {
        name for name in models.build("llama").state_dict() if "layers.1" in name
    }
    assert {left.name for left in report.left_out} == {
        name for name in models.build("llama").state_dict() if "layers.1" not in name
    }
