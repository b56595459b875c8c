"""A save changes nothing: losses, weights, masters and moments afterwards are those of no save."""

import functools

import pytest
import torch

import zckpt
from zckpt.testing import models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]

MOMENTS = ["after_step", "before_step", "in_accumulation", "after_forward", "after_evaluation"]


def state_of(engine):
    """All that training goes on from, on this rank, without the garbage in paddings."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    state = {"buffers": {n: b.clone() for n, b in engine.module.named_buffers()}}
    for name, p in engine.module.named_parameters():
        start = engine.global_rank * p.ds_tensor.numel()
        own = slice(0, max(0, min(p.ds_tensor.numel(), p.ds_numel - start)))
        state[name] = [p.ds_tensor[own].clone()]
        if not (p.requires_grad and p.ds_numel):
            continue  # no optimizer holds it
        state[name] += [
            safe_get_local_fp32_param(p)[own].detach().clone(),
            safe_get_local_optimizer_state(p, "exp_avg")[own].clone(),
            safe_get_local_optimizer_state(p, "exp_avg_sq")[own].clone(),
        ]
    return state


def copies_of(engine):
    """What the forward would see without a gather: statuses and gathered values."""
    return {
        n: (p.ds_status.name, p.data.clone(), sorted(p.ds_active_sub_modules))
        for n, p in engine.module.named_parameters()
    }


def run(config, out, moment, save, name="gpt2"):
    """Train four steps with dropout, with or without a save at a moment of the second."""
    engine = models.make_engine(models.build(name), config)
    accumulation = config["gradient_accumulation_steps"]
    torch.manual_seed(5 + engine.global_rank)
    losses, seen = [], []

    def perhaps(now, step):
        if save is not None and now == moment and step == accumulation:
            before = copies_of(engine)
            zckpt.save_consolidated(engine, out, **save)
            seen.append((before, copies_of(engine)))

    for step in range(4 * accumulation):
        value = models.loss(engine, models.batch(100 * step + engine.global_rank))
        perhaps("after_forward", step)
        engine.backward(value)
        perhaps("in_accumulation" if accumulation > 1 else "before_step", step)
        engine.step()
        losses.append(value.item())
        perhaps("after_step", step)
        if step == accumulation and moment == "after_evaluation":
            engine.eval()
            with torch.no_grad():
                models.evaluate(engine.module)
            perhaps("after_evaluation", step)
            engine.train()
    return losses, state_of(engine), seen


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@functools.cache
def without_save(world_size, dtype, moment, forced_release):
    config = config_for(dtype, moment, forced_release)
    return run_ranks(run, world_size, config, None, moment, None)


def config_for(dtype, moment, forced_release):
    steps = 2 if moment == "in_accumulation" else 1
    return models.ds_config(dtype=dtype, accumulation_steps=steps, forced_release=forced_release)


HOW = {
    "live": {"bucket_bytes": 5000},
    "evaluated": {"eval_fn": models.evaluate},
    "master": {"weights": "master", "bucket_bytes": 5000},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "world_size, dtype, forced_release, how",
    [
        (2, "bf16", True, "live"),
        (2, "bf16", True, "evaluated"),
        (2, "bf16", True, "master"),
        (3, "fp32", True, "live"),
        (2, "bf16", False, "live"),
        (2, "bf16", False, "evaluated"),
    ],
)
def test_four_steps_with_a_save_are_four_steps_without(
    world_size, dtype, forced_release, moment, how, tmp_path
):
    config = config_for(dtype, moment, forced_release)
    saved = run_ranks(run, world_size, config, str(tmp_path / "out"), moment, HOW[how])
    plain = without_save(world_size, dtype, moment, forced_release)
    for (losses, state, _), (saved_losses, saved_state, seen) in zip(plain, saved, strict=True):
        assert saved_losses == losses
        assert [n for n in state if not same(saved_state[n], state[n])] == []
        ((before, after),) = seen
        assert [n for n in before if not same(after[n], before[n])] == []
    assert zckpt.verify(tmp_path / "out").is_fine


def run_both(config, out, moment, name):
    """Train without and with a save; return the names of what differs on this rank."""
    losses, state, _ = run(config, None, moment, None, name)
    saved_losses, saved_state, ((before, after),) = run(
        config, out, moment, {"eval_fn": models.evaluate, "bucket_bytes": 3000}, name
    )
    differing = [n for n in state if not same(saved_state[n], state[n])]
    disturbed = [n for n in before if not same(after[n], before[n])]
    return losses, saved_losses, differing, disturbed


@pytest.mark.parametrize("moment", ["before_step", "in_accumulation"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "t5", "bert", "odd", "frozen", "checkpointed"]
)
def test_the_same_of_every_model(name, moment, tmp_path):
    config = config_for("bf16", moment, forced_release=True)
    for losses, saved_losses, differing, disturbed in run_ranks(
        run_both, 2, config, str(tmp_path / "out"), moment, name
    ):
        assert saved_losses == losses
        assert len(set(losses)) > len(losses) // 2  # it trains (t5 returns its loss in bf16)
        assert (differing, disturbed) == ([], [])
