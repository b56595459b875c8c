"""Loading into engines: partitions, masters and gathered copies all change, for good."""

import pytest
import torch
from safetensors.torch import save_file

import zckpt
import zckpt.live
from zckpt.testing import models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]

PLAIN = {"memory_efficient_linear": False}
"""Without it, DeepSpeed's linear layers round once more than torch's, so losses would differ."""

ENGINES = {
    "z3-bf16": models.ds_config(lr=0.0, zero=PLAIN),
    "z3-fp32": models.ds_config(lr=0.0, dtype="fp32", zero=PLAIN),
    "z3-defaults": models.ds_config(lr=0.0, forced_release=False, zero=PLAIN),
    "z3-sub-groups": models.ds_config(lr=0.0, zero={"sub_group_size": 500, **PLAIN}),
    "z3-offload": models.ds_config(
        lr=0.0,
        zero={
            **PLAIN,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "cpu", "pin_memory": False},
        },
    ),
    "z2-bf16": models.ds_config(lr=0.0, stage=2),
    "z2-round-robin": models.ds_config(lr=0.0, stage=2, zero={"round_robin_gradients": True}),
    "z1-bf16": models.ds_config(lr=0.0, stage=1),
    "z1-fp32": models.ds_config(lr=0.0, stage=1, dtype="fp32"),
    "z0-bf16": models.ds_config(lr=0.0, stage=0),
    "z0-fp32": models.ds_config(lr=0.0, stage=0, dtype="fp32"),
}


def reference():
    """Values that no engine here starts with, under every name of the model."""
    model = models.build("odd", seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        model.count.add_(5)
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


def load_and_step(path, config, steps_before):
    engine = models.make_engine(models.build("odd"), config)
    models.train(engine, range(steps_before))
    zckpt.load_consolidated(engine, path)
    loaded = {"truth": models.truth(engine.module), "forward": forward(engine)}
    models.train(engine, range(10, 12))  # at learning rate 0
    stepped = {"truth": models.truth(engine.module), "forward": forward(engine)}
    return loaded, stepped


def forward(engine):
    engine.eval()
    with torch.no_grad():
        value = models.evaluate(engine.module)
    engine.train()
    return value


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_at_lr_0_leaves_what_was_loaded(kind, steps_before, tmp_path):
    source = models.build("odd", seed=3)
    source.load_state_dict(reference())
    zckpt.save_consolidated(source, tmp_path / "out")
    dtype = torch.bfloat16 if ENGINES[kind]["bf16"]["enabled"] else torch.float32
    parameters = dict(source.named_parameters(remove_duplicate=False))
    expected = {n: v.to(dtype) if n in parameters else v for n, v in source.state_dict().items()}
    ranks = run_ranks(load_and_step, 2, str(tmp_path / "out"), ENGINES[kind], steps_before)
    torch.set_num_threads(1)
    for parameter in source.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        loss = models.evaluate(source.eval())
    for loaded, stepped in ranks:
        for state in (loaded, stepped):
            assert [n for n in expected if not torch.equal(state["truth"][n], expected[n])] == []
            assert state["forward"] == loss


def flip_a_bit(file, tensor_name):
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        value = handle.get_tensor(tensor_name)
    raw = value.contiguous().view(torch.uint8).numpy().tobytes()
    data = bytearray(file.read_bytes())
    position = data.find(raw)
    assert position > 0
    data[position + len(raw) // 2] ^= 1
    file.write_bytes(data)


def try_to_load(path, config, options):
    """The error on this rank, and whether the engine is as it was."""
    engine = models.make_engine(models.build("odd"), config)
    models.train(engine, range(2))
    before = models.truth(engine.module)
    masters = [m.values.clone() for m in zckpt.live.look_at(engine).masters.values()]
    try:
        zckpt.load_consolidated(engine, path, **options)
        error = None
    except zckpt.ZckptError as caught:
        error = (type(caught).__name__, str(caught))
    after = models.truth(engine.module)
    kept = all(torch.equal(before[n], after[n]) for n in before)
    now = [m.values for m in zckpt.live.look_at(engine).masters.values()]
    kept = kept and all(map(torch.equal, masters, now))
    models.train(engine, range(2, 3))  # the group still works on every rank
    return error, kept


def damaged(tmp_path, how):
    """A checkpoint of the odd model with one thing wrong, and what the error has to name."""
    out = tmp_path / "out"
    values = reference()
    if how in {"missing", "shape", "dtype", "unexpected"}:
        owners = {n: v for n, v in values.items() if n not in ("uno", "head.weight")}
        owners = {n: v for n, v in owners.items() if not n.startswith("again")}
        if how == "missing":
            del owners["ln.bias"]
        if how == "shape":
            owners["ln.bias"] = torch.zeros(7)
        if how == "dtype":
            owners["count"] = owners["count"].to(torch.int32)
        if how == "unexpected":
            owners["stranger"] = torch.zeros(2)
        out.mkdir()
        save_file(owners, out / "model.safetensors")
        return out
    source = models.build("odd")
    source.load_state_dict(values)
    zckpt.save_consolidated(source, out)
    file = out / "model.safetensors"
    if how == "flipped":
        flip_a_bit(file, "emb.weight")
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    if how == "gone":
        file.unlink()
    return out


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "how, error, named",
    [
        ("missing", "SpecMismatchError", "ln.bias"),
        ("shape", "SpecMismatchError", "ln.bias"),
        ("dtype", "SpecMismatchError", "count"),
        ("unexpected", "SpecMismatchError", "stranger"),
        ("flipped", "CorruptCheckpointError", "emb.weight"),
        ("truncated", "CorruptCheckpointError", "model.safetensors"),
        ("gone", "CorruptCheckpointError", "model.safetensors"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    how, error, named, stage, tmp_path
):
    out = damaged(tmp_path, how)
    for (kind, text), kept in run_ranks(
        try_to_load, 2, str(out), models.ds_config(stage=stage), {}
    ):
        assert kind == error
        assert named in text
        assert kept


def test_permitted_names_and_unchecked_digests_load(tmp_path):
    for how, options in {
        "missing": {"allow_missing": ["ln.*"]},
        "unexpected": {"allow_unexpected": ["strange?"]},
        "flipped": {"check": False},
    }.items():
        out = damaged(tmp_path / how, how) if (tmp_path / how).mkdir() is None else None
        for error, kept in run_ranks(try_to_load, 2, str(out), models.ds_config(), options):
            assert error is None
            assert not kept


def load_where_only_rank_0_sees(path):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    mine = path if engine.global_rank == 0 else path + "-not-here"
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.load_consolidated(engine, mine)
    return str(caught.value)


def test_other_paths_on_other_ranks_are_an_error(tmp_path):
    out = damaged(tmp_path, "fine")
    for text in run_ranks(load_where_only_rank_0_sees, 2, str(out)):
        assert "rank 1" in text
