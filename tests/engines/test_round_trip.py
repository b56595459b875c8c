"""Every kind of model through every kind of engine and back: values bit for bit, losses equal."""

import json

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.testing import models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]

MODELS = ["gpt2", "llama", "llama_tied", "t5", "bert", "odd", "frozen", "checkpointed"]


def unwrapped(name):
    return name.replace("._checkpoint_wrapped_module", "")


def train_and_save(name, config, out, save):
    """On each rank: the partitions, the live loss, the module's own names, what save returned."""
    engine = models.make_engine(models.build(name), config)
    models.train(engine, range(3))
    truth = {unwrapped(n): v for n, v in models.truth(engine.module).items()}
    masters = read_masters(engine)
    copies = [p.ds_status.name for p in engine.module.parameters() if hasattr(p, "ds_status")]
    report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate, **save)
    after = {unwrapped(n): v for n, v in models.truth(engine.module).items()}
    same = all(torch.equal(truth[n], after[n]) for n in truth)
    engine.module.eval()
    with torch.no_grad():
        loss = models.evaluate(engine.module)
    return {
        "truth": truth,
        "masters": masters,
        "copies": copies,
        "loss": loss,
        "untouched": same,
        "stale": report.stale_copies,
        "buckets": report.buckets,
        "writers": report.writer_ranks,
    }


def read_masters(engine):
    """The fp32 masters through DeepSpeed's own public function."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        # For a parameter without elements DeepSpeed's function raises a KeyError.
        if parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()):
            value = safe_get_full_fp32_param(parameter)
            if value is not None:
                found[unwrapped(name)] = value.detach().clone()
    return found


def reload(name, out, dtype):
    """On each rank: the losses of a plain, a Hugging Face and a ZeRO-3 model."""
    losses, recorded = {}, {}
    with torch.no_grad():
        plain = models.build(name, seed=1)
        cast_parameters(plain, dtype)
        zckpt.load_consolidated(plain, out)
        recorded["plain"] = models.evaluate(plain.eval())
        if hasattr(plain, "config"):
            recorded["hf"] = models.evaluate(type(plain).from_pretrained(out).eval())
        # From here on DeepSpeed's own linear layers are in use, in the whole process.
        engine = models.make_engine(models.build(name, seed=1), models.ds_config(dtype=dtype))
        report = zckpt.load_consolidated(engine, out)
        truth = {unwrapped(n): v for n, v in models.truth(engine.module).items()}
        losses["zero"] = models.evaluate(engine.module.eval())
        losses["plain"] = models.evaluate(plain)
    again = zckpt.save_consolidated(engine, out + "-again", eval_fn=models.evaluate)
    recorded["zero"] = float.fromhex(again.manifest.evaluation.mean.hex)
    return {
        "losses": losses,
        "recorded": recorded,
        "truth": truth,
        "buffers": report.differing_buffers,
    }


def cast_parameters(module, dtype):
    """As DeepSpeed does it: parameters and only they change dtype."""
    target = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(target)


def assert_same(expected, found):
    assert sorted(expected) == sorted(found)
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_equals_partitions_and_losses_agree_everywhere(name, dtype, tmp_path):
    out = str(tmp_path / "out")
    save_ranks, load_ranks = (2, 3) if dtype == "bf16" else (3, 2)
    ranks = run_ranks(
        train_and_save, save_ranks, name, models.ds_config(dtype=dtype), out, {"bucket_bytes": 1500}
    )
    first = ranks[0]
    assert set(first["copies"]) == {"AVAILABLE", "NOT_AVAILABLE"}  # both kinds were there
    assert first["untouched"]
    assert first["stale"] == ()
    assert first["buckets"] > 3
    assert first["writers"] == save_ranks

    checkpoint = zckpt.open(out)
    assert_same(first["truth"], dict(checkpoint))  # every name of state_dict(), aliases too
    stored = load_file(f"{out}/model.safetensors")
    assert len(stored) == len(checkpoint.stored)
    assert zckpt.verify(out).is_fine

    manifest = json.loads((tmp_path / "out" / "zckpt_manifest.json").read_bytes())
    recorded = {float.fromhex(rank["hex"]) for rank in manifest["evaluation"]["ranks"]}

    # The arithmetic is the same wherever linear layers are torch's own (one thread, the same
    # kernels, the same values), so the losses are equal bit for bit; and likewise wherever they are
    # DeepSpeed's. Between the two lies a rounding, see the next test.
    for rank in run_ranks(reload, load_ranks, name, out, dtype):
        assert_same(first["truth"], rank["truth"])
        assert set(rank["recorded"].values()) == recorded
        assert set(rank["losses"].values()) == {first["loss"]}
        assert rank["buffers"] == ()


def losses_with_either_linear(out):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    models.train(engine, range(3))
    patched = torch.nn.functional.linear
    report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate)
    with torch.no_grad():
        live = models.evaluate(engine.module.eval())
    kept = torch.nn.functional.linear is patched
    return live, float.fromhex(report.manifest.evaluation.mean.hex), kept


def plain_loss(out):
    plain = models.build("odd", seed=1)
    cast_parameters(plain, "bf16")
    zckpt.load_consolidated(plain, out)
    with torch.no_grad():
        return models.evaluate(plain.eval())


def test_the_recorded_loss_is_the_one_a_process_without_deepspeed_gets(tmp_path):
    """ZeRO-3 replaces torch's linear function by one that rounds differently in bf16."""
    out = str(tmp_path / "out")
    live, recorded, kept = run_ranks(losses_with_either_linear, 2, out)[0]
    assert kept
    assert run_ranks(plain_loss, 1, out, deepspeed=False) == [recorded]
    assert live != recorded  # the same weights
    assert abs(live - recorded) < 2**-8 * recorded  # bf16 has 8 significant bits


@pytest.mark.parametrize("name", ["gpt2", "odd"])
def test_defaults_that_keep_everything_gathered(name, tmp_path):
    out = str(tmp_path / "out")
    config = models.ds_config(forced_release=False)
    first, _ = run_ranks(train_and_save, 2, name, config, out, {})
    assert set(first["copies"]) == {"AVAILABLE"}
    assert_same(first["truth"], dict(zckpt.open(out)))


@pytest.mark.parametrize(
    "config",
    [
        models.ds_config(stage=0),
        models.ds_config(stage=1),
        models.ds_config(stage=2),
        models.ds_config(stage=2, zero={"round_robin_gradients": True}),
        models.ds_config(stage=1, dtype="fp32"),
        models.ds_config(stage=3),
        models.ds_config(stage=3, zero={"sub_group_size": 500}),
        models.ds_config(
            stage=3,
            zero={
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            },
        ),
    ],
    ids=["z0", "z1", "z2", "z2-round-robin", "z1-fp32", "z3", "z3-sub-groups", "z3-offload"],
)
def test_masters_are_the_optimizers(config, tmp_path):
    out = str(tmp_path / "out")
    first, *_ = run_ranks(train_and_save, 3, "frozen", config, out, {"weights": "master"})
    found = dict(zckpt.open(out))
    manifest = zckpt.open(out).manifest
    came_from = {record.name: record.value_from for record in manifest.tensors}
    assert set(came_from.values()) == {"master", "frozen"}
    for name, value in first["truth"].items():
        owner = zckpt.open(out).owner(name)
        if came_from[owner] == "frozen":
            assert torch.equal(found[name], value)
        else:
            assert found[name].dtype == torch.float32
            # One rounding of the master is the live weight: true of every step of AdamW.
            assert torch.equal(found[name].to(value.dtype), value), name
    if "round_robin_gradients" not in config["zero_optimization"]:
        # There DeepSpeed's own function was seen to return other tensors' values.
        for name, value in first["masters"].items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_the_odd_model(stage, tmp_path):
    out = str(tmp_path / "out")
    config = models.ds_config(stage=stage)
    first, _ = run_ranks(train_and_save, 2, "odd", config, out, {"weights": "master"})
    found = dict(zckpt.open(out))
    assert found["one"].dtype == torch.float32
    assert first["masters"]
    for name, value in first["masters"].items():
        assert torch.equal(found[name], value), name


def test_cast_rounds_parameters_once_and_no_buffer(tmp_path):
    out = str(tmp_path / "out")
    save = {"dtype": "fp16"}
    first, _ = run_ranks(train_and_save, 2, "odd", models.ds_config(dtype="fp32"), out, save)
    found = dict(zckpt.open(out))
    parameters = dict(models.build("odd").named_parameters(remove_duplicate=False))
    for name, value in first["truth"].items():
        expected = value.to(torch.float16) if name in parameters else value
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name


def client_and_no_optimizer(out):
    """Save engines with a client optimizer and with none, and a zero.Init module."""
    import deepspeed

    results = {}
    model = models.build("llama_tied")
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = models.make_engine(model, models.ds_config(optimizer=False), client)
    models.train(engine, range(2))
    zckpt.save_consolidated(engine, f"{out}/client")
    results["client"] = models.truth(engine.module)

    engine, *_ = deepspeed.initialize(
        model=models.build("llama_tied"), config=models.ds_config(optimizer=False)
    )
    zckpt.save_consolidated(engine, f"{out}/none", eval_fn=models.evaluate)
    results["none"] = models.truth(engine.module)

    model = models.build("llama_tied")
    deepspeed.zero.Init(module=model.model, config_dict_or_path=models.ds_config())
    torch.manual_seed(torch.distributed.get_rank())
    model.extra = torch.nn.Linear(3, 3)  # a part that is not partitioned
    kinds = {hasattr(p, "ds_tensor") for p in model.parameters()}
    zckpt.save_consolidated(model, f"{out}/init")
    results["init"] = models.truth(model)
    return results, kinds


def test_client_optimizer_no_optimizer_and_zero_init(tmp_path):
    first, second = run_ranks(client_and_no_optimizer, 2, str(tmp_path))
    results, kinds = first
    assert kinds == {True, False}
    for kind, truth in results.items():
        found = dict(zckpt.open(tmp_path / kind))
        if kind == "init":
            # not the same on every rank: rank 0's are saved
            for name in ("extra.weight", "extra.bias"):
                assert not torch.equal(truth[name], second[0][kind][name])
        assert_same(truth, found)
