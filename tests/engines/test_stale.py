"""Gathered copies that disagree with their partitions: found, named, not saved, not disturbed."""

import pytest
import torch

import zckpt
from zckpt.testing import RanksError, models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]


def loss_of(engine):
    engine.module.eval()
    with torch.no_grad():
        return models.evaluate(engine.module)


def copies_of(engine):
    return {
        n: p.data.clone()
        for n, p in engine.module.named_parameters()
        if p.ds_status.name == "AVAILABLE"
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def move_partitions(engine, by=1.0):
    """What a fused optimizer does: update the partitions, tell nobody."""
    for parameter in engine.module.parameters():
        parameter.ds_tensor.add_(by)


def fused(out, optimizer, save):
    """An engine whose partitions moved on under its gathered copies."""
    engine = models.make_engine(
        models.build("odd"),
        models.ds_config(
            dtype="fp32", optimizer=optimizer, zero={"memory_efficient_linear": False}
        ),
    )
    if optimizer:
        models.train(engine, range(2))
    else:
        loss_of(engine)
        engine.module(models.batch(0))
    move_partitions(engine)
    copies = copies_of(engine)
    truth = models.truth(engine.module)
    stale = [n for n in copies if not torch.equal(copies[n], truth[n])]
    report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate, **save)
    result = {
        "truth": truth,
        "stale": stale,
        "found": report.stale_copies,
        "copies kept": equal(copies, copies_of(engine)),
        "partitions kept": equal(truth, models.truth(engine.module)),
        "warnings": report.warnings,
    }
    result["live loss"] = loss_of(engine)  # with the stale copies: what the trainer sees
    result["refreshed"] = zckpt.resync(engine)
    result["again"] = zckpt.resync(engine)
    result["true loss"] = loss_of(engine)
    return result


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", [True, False])
def test_partitions_are_saved_and_stale_copies_named_and_left_alone(
    optimizer, world_size, tmp_path
):
    out = str(tmp_path / "out")
    for rank in run_ranks(fused, world_size, out, optimizer, {}):
        assert len(rank["stale"]) > 3
        assert set(rank["found"]) == set(rank["stale"])
        assert rank["copies kept"]
        assert rank["partitions kept"]
        assert any(str(len(rank["stale"])) in text for text in rank["warnings"])
        assert set(rank["refreshed"]) >= set(rank["stale"])
        assert rank["again"] == []
        assert rank["true loss"] != rank["live loss"]
    checkpoint = zckpt.open(out)
    assert equal(rank["truth"], dict(checkpoint))
    evaluation = checkpoint.manifest.evaluation
    assert float.fromhex(evaluation.mean.hex) == rank["true loss"]
    assert float.fromhex(evaluation.with_stale_copies.hex) == rank["live loss"]
    assert set(checkpoint.manifest.stale_copies) == set(rank["stale"])

    plain = models.build("odd", seed=1)
    zckpt.load_consolidated(plain, out)
    torch.set_num_threads(1)
    with torch.no_grad():
        assert models.evaluate(plain.eval()) == rank["true loss"]


def test_a_copy_that_only_one_rank_spoiled_is_found(tmp_path):
    for found, kept in run_ranks(spoil_on_one_rank, 2, str(tmp_path / "out")):
        assert found == ("ln.weight",)
        assert kept


def spoil_on_one_rank(out):
    engine = models.make_engine(models.build("odd"), models.ds_config(dtype="fp32"))
    models.train(engine, range(2))
    truth = models.truth(engine.module)
    if engine.global_rank == 0:  # in the part of it that rank 1 holds, so rank 1's slice agrees
        engine.module.ln.weight.data[-1] = 9.0
    report = zckpt.save_consolidated(engine, out)
    return report.stale_copies, equal(truth, dict(zckpt.open(out)))


@pytest.mark.parametrize("weights", ["live", "master"])
def test_stale_error_refuses_on_every_rank_and_writes_nothing(weights, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RanksError, match="gathered copies disagreed") as caught:
        run_ranks(fused, 2, str(out), True, {"stale": "error", "weights": weights})
    assert sorted(caught.value.failures) == [0, 1]
    assert list(tmp_path.iterdir()) == []


def lomo_run(out, name, save_after):
    """Six steps of real LOMO, perhaps with a save after some; return what training became."""
    from lomo_optim import Lomo
    from transformers.integrations import HfDeepSpeedConfig

    config = models.ds_config(dtype="fp32", optimizer=False)
    alive = HfDeepSpeedConfig(config)  # while it lives, lomo_optim takes its ZeRO-3 path
    import deepspeed

    engine, *_ = deepspeed.initialize(model=models.build(name), config=config)
    lomo = Lomo(engine.module, lr=0.5)
    engine.module.train()
    live = []
    for step in range(6):
        value = models.loss(engine.module, models.batch(50 * step + engine.global_rank))
        lomo.fused_backward(value, lr=0.5)
        engine.optimizer.get_param_coordinator().reset_step()
        if step + 1 == save_after:
            # right after the backward pass, where a plain gather raises
            report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate)
            live.append((report.stale_copies, models.truth(engine.module)))
    del alive
    return models.truth(engine.module), live


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_real_lomo_is_saved_from_its_partitions_and_not_disturbed(name, tmp_path):
    out = str(tmp_path / "out")
    undisturbed = run_ranks(lomo_run, 2, None, name, None)
    saved = run_ranks(lomo_run, 2, out, name, 3)
    found = dict(zckpt.open(out))
    for (truth, _), (truth_with_save, ((stale, at_save),)) in zip(undisturbed, saved, strict=True):
        assert equal(truth, truth_with_save)
        assert len(stale) > 5
        assert equal(at_save, found)
    evaluation = zckpt.open(out).manifest.evaluation
    assert evaluation.mean != evaluation.with_stale_copies
    owners = {record.value_from for record in zckpt.open(out).manifest.tensors}
    assert owners == {"unowned"}  # no DeepSpeed optimizer holds what LOMO trains
