"""Save a plain module, load it back: everything is what it was, or it is said that it is not."""

import copy
import json
import logging
import math
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zckpt
from zckpt.errors import (
    CorruptCheckpointError,
    NameCollisionError,
    SpecMismatchError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from zckpt.plan import INDEX_NAME

ONE = "model.safetensors"


def bits(tensor):
    flat = tensor.detach().reshape(-1).contiguous()
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist()


def all_bits(tensors):
    return {n: bits(t) for n, t in tensors.items() if isinstance(t, torch.Tensor)}


def blank(module):
    """Return a copy whose every parameter and persistent buffer holds something else."""
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(torch.ones_like(tensor))
    return fresh


def stored(folder):
    """The tensors of a folder, read by the safetensors library alone."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------ odd tensors


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(5, 3)
        self.scalar = nn.Parameter(torch.tensor(0.1))
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.brain = nn.Parameter(torch.randn(2, 3).bfloat16(), requires_grad=False)
        self.precise = nn.Parameter(torch.randn(2).double())
        self.strided = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("count", torch.tensor(16777217))
        self.register_buffer("mask", torch.tensor([[True, False], [False, True]]))
        self.register_buffer("third", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(7).to(torch.float8_e4m3fn))
        self.register_buffer("every_other", torch.arange(10, dtype=torch.int16)[::2])
        self.register_buffer("special", torch.tensor([math.nan, -0.0, math.inf, 1e-45]))
        self.register_buffer("frequency", torch.arange(4.0), persistent=False)
        assert not self.strided.is_contiguous()


def test_every_bit_of_an_odd_module_comes_back(out):
    model = Odd()
    before = all_bits(model.state_dict())
    report = zckpt.save_consolidated(model, out)
    assert all_bits(model.state_dict()) == before
    assert all_bits(stored(out)) == before
    assert report.warnings == ()
    fresh = blank(model)
    loaded = zckpt.load_consolidated(fresh, out)
    assert all_bits(fresh.state_dict()) == before
    assert sorted(loaded.loaded) == sorted(before)
    assert (loaded.missing, loaded.unexpected, loaded.retied, loaded.expanded, loaded.cast) == (
        (),
        (),
        {},
        (),
        (),
    )
    assert loaded.digests_checked
    assert not fresh.strided.is_contiguous()
    library = blank(model)
    library.every_other = library.every_other.clone()  # load_model refuses a view as its target
    assert safetensors.torch.load_model(library, str(out / ONE)) == (set(), [])
    assert all_bits(library.state_dict()) == before


def test_the_manifest_says_what_was_saved(out):
    model = Odd()
    manifest = zckpt.save_consolidated(model, out).manifest
    records = {record.name: record for record in manifest.tensors}
    assert list(records) == list(model.state_dict())
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        record = records[name]
        assert (record.shape, f"torch.{record.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert record.role == ("parameter" if name in parameters else "buffer")
        assert record.trainable == (name in parameters and parameters[name].requires_grad)
    assert records["brain"].value_from == "frozen"
    assert manifest.provenance.source == "module"
    assert manifest.provenance.world_size == 1
    assert [(b.name, b.dtype, b.shape) for b in manifest.unstored_buffers] == [
        ("frequency", "float32", (4,))
    ]
    assert zckpt.verify(out).is_fine


def test_a_buffer_that_is_a_conjugate_view_is_stored_as_its_values(out):
    model = nn.Linear(1, 1)
    values = torch.tensor([1 + 2j, 3 - 1j])
    model.register_buffer("wave", values.conj())
    zckpt.save_consolidated(model, out)
    assert bits(stored(out)["wave"]) == bits(torch.tensor([1 - 2j, 3 + 1j]))
    fresh = nn.Linear(1, 1)
    fresh.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    zckpt.load_consolidated(fresh, out)
    assert torch.equal(fresh.wave, values.conj().resolve_conj())


def test_a_tensor_that_no_file_can_hold_is_named(out):
    model = nn.Linear(1, 1)
    model.register_buffer("fine", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match=r"fine.*complex128"):
        zckpt.save_consolidated(model, out)
    model.register_buffer("fine", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"fine.*sparse"):
        zckpt.save_consolidated(model, out)
    with pytest.raises(UnsupportedError, match=r"meta device.*weight"):
        zckpt.save_consolidated(nn.Linear(2, 2, device="meta"), out)
    with pytest.raises(UnsupportedError, match="dict"):
        zckpt.save_consolidated({"weight": torch.ones(1)}, out)
    assert left_in(out.parent) == []


# ------------------------------------------------------------------ shared tensors


def test_a_parameter_under_two_names_of_one_module_is_stored_once(out):
    def make():
        model = nn.Module()
        model.a = nn.Parameter(torch.randn(3))
        model.b = model.a
        return model

    model = make()
    report = zckpt.save_consolidated(model, out)
    assert list(stored(out)) == ["a"]
    assert report.aliases == {"b": "a"}
    fresh = make()
    loaded = zckpt.load_consolidated(fresh, out)
    assert loaded.retied == {"b": "a"}
    assert fresh.a is fresh.b
    assert bits(fresh.b) == bits(model.a)
    assert safetensors.torch.load_model(make(), str(out / ONE)) == (set(), [])
    make().load_state_dict(dict(zckpt.open(out)), strict=True)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("cache", torch.randn(2), persistent=False)


def test_a_module_under_two_names_is_stored_once(out):
    model = nn.ModuleDict({"x": Inner(), "other": nn.Linear(2, 2)})
    model["y"] = model["x"]
    report = zckpt.save_consolidated(model, out)
    assert report.aliases == {"y.weight": "x.weight", "y.steps": "x.steps"}
    assert set(stored(out)) == {"x.weight", "x.steps", "other.weight", "other.bias"}
    fresh = blank(model)
    assert zckpt.load_consolidated(fresh, out).differing_buffers == ()
    assert all_bits(fresh.state_dict()) == all_bits(model.state_dict())


def test_equal_tensors_that_are_not_shared_stay_two(out):
    model = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})
    model["y"].load_state_dict(model["x"].state_dict())
    report = zckpt.save_consolidated(model, out)
    assert report.aliases == {}
    assert set(stored(out)) == set(model.state_dict())


def test_views_into_one_storage_are_not_one_tensor(out):
    model = nn.Module()
    whole = torch.arange(8.0)
    model.register_buffer("whole", whole)
    model.register_buffer("first", whole[:4])
    model.register_buffer("last", whole[4:])
    model.register_buffer("square", whole.view(2, 4))
    before = all_bits(model.state_dict())
    assert zckpt.save_consolidated(model, out).aliases == {}
    assert all_bits(stored(out)) == before


def test_two_parameter_objects_over_one_memory_are_one_tensor(out):
    model = nn.ModuleDict({"x": nn.Linear(2, 2, bias=False), "y": nn.Linear(2, 2, bias=False)})
    model["y"].weight = nn.Parameter(model["x"].weight.data)
    assert zckpt.save_consolidated(model, out).aliases == {"y.weight": "x.weight"}
    fresh = nn.ModuleDict({"x": nn.Linear(2, 2, bias=False), "y": nn.Linear(2, 2, bias=False)})
    report = zckpt.load_consolidated(fresh, out)
    assert sorted(report.expanded) == ["x.weight", "y.weight"]
    assert bits(fresh["y"].weight) == bits(model["x"].weight) == bits(fresh["x"].weight)


# ------------------------------------------------------------------ what a state dict can do


class WithExtraState(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_state_that_is_a_tensor_comes_back(out):
    state = torch.tensor([1, 2, 300], dtype=torch.int64)
    model = nn.ModuleDict({"q": WithExtraState(state)})
    report = zckpt.save_consolidated(model, out)
    assert bits(stored(out)["q._extra_state"]) == bits(state)
    assert report.warnings == ()
    assert {r.role for r in report.manifest.tensors} == {"parameter", "extra_state"}
    fresh = nn.ModuleDict({"q": WithExtraState(torch.zeros(3, dtype=torch.int64))})
    zckpt.load_consolidated(fresh, out)
    assert bits(fresh["q"].state) == bits(state)


def test_extra_state_of_the_module_itself_comes_back(out):
    zckpt.save_consolidated(WithExtraState(torch.tensor(2.5)), out)
    fresh = WithExtraState(torch.tensor(0.0))
    zckpt.load_consolidated(fresh, out)
    assert fresh.state.item() == 2.5


@pytest.mark.parametrize("is_one_object", [True, False])
def test_extra_state_of_a_module_under_two_names_comes_back(out, is_one_object):
    class Fresh(WithExtraState):
        def get_extra_state(self):
            return self.state if is_one_object else self.state.clone()

    def make(value):
        model = nn.ModuleDict({"x": Fresh(torch.tensor([value]))})
        model["y"] = model["x"]
        return model

    zckpt.save_consolidated(make(2.5), out)
    fresh = make(0.0)
    zckpt.load_consolidated(fresh, out)
    assert fresh["y"].state.tolist() == [2.5]


def test_extra_state_that_is_no_tensor_is_left_out_and_said(out, caplog):
    model = nn.ModuleDict({"q": WithExtraState({"amax": 1.0}), "r": nn.Linear(1, 1)})
    with caplog.at_level(logging.WARNING, logger="zckpt"):
        report = zckpt.save_consolidated(model, out)
    assert [left.name for left in report.manifest.left_out] == ["q._extra_state"]
    assert "q._extra_state" in report.warnings[0]
    assert "q._extra_state" in caplog.text
    assert set(stored(out)) == {"q.weight", "r.weight", "r.bias"}
    fresh = blank(model)
    zckpt.load_consolidated(fresh, out)
    assert all_bits(fresh.state_dict()) == all_bits(model.state_dict())


def renaming(module, state, prefix, metadata):
    for name in list(state):
        state[name.replace("weight", "kernel")] = state.pop(name)


def test_names_are_those_that_a_hook_gives(out):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model.register_state_dict_post_hook(renaming)
    zckpt.save_consolidated(model, out)
    assert set(stored(out)) == set(model.state_dict())
    assert "0.kernel" in stored(out)
    assert all_bits(stored(out)) == all_bits(model.state_dict())
    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fresh.register_state_dict_post_hook(renaming)
    zckpt.load_consolidated(fresh, out)
    assert all_bits(fresh.state_dict()) == all_bits(model.state_dict())


def doubling(module, state, prefix, metadata):
    state["weight"] = state["weight"].detach() * 2


def test_a_tensor_that_a_hook_makes_is_saved_and_refused_as_a_target(out):
    model = nn.Linear(2, 2)
    expected = bits(model.weight * 2)
    model.register_state_dict_post_hook(doubling)
    zckpt.save_consolidated(model, out)
    assert bits(stored(out)["weight"]) == expected
    before = all_bits(dict(model.named_parameters()))
    with pytest.raises(UnsupportedError, match="weight"):
        zckpt.load_consolidated(model, out)
    assert all_bits(dict(model.named_parameters())) == before


# ------------------------------------------------------------------ Hugging Face models


def gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes)))


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=13, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=13,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    return BertForMaskedLM(config)


MODELS = {
    "gpt2": gpt2,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama untied": lambda: llama(tie_word_embeddings=False),
    "t5": t5,
    "bert": bert,
}
TOKENS = torch.tensor([[1, 5, 2, 12, 0]])


def logits(model):
    model.eval()
    inputs = {"input_ids": TOKENS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS
    with torch.no_grad():
        return model(**inputs).logits


def make(kind):
    torch.manual_seed(11)
    return MODELS[kind]()


@pytest.mark.parametrize("kind", MODELS)
def test_a_hugging_face_model_comes_back_by_every_way(kind, out, tmp_path):
    model = make(kind)
    state = model.state_dict()
    report = zckpt.save_consolidated(model, out)
    model.save_pretrained(tmp_path / "theirs")

    # the same names in the file as transformers keeps, every value bit for bit
    theirs = stored(tmp_path / "theirs")
    assert set(stored(out)) == set(theirs)
    assert all_bits(stored(out)) == all_bits(theirs)
    assert set(stored(out)) | set(report.aliases) == set(state)
    assert all_bits(zckpt.open(out)) == all_bits(state)
    assert zckpt.verify(out).is_fine

    # by the safetensors library, by torch, by transformers, by us
    assert safetensors.torch.load_model(blank(model), str(out / ONE)) == (set(), [])
    strict = blank(model)
    strict.load_state_dict(dict(zckpt.open(out)), strict=True)
    pretrained, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    fresh = blank(model)
    zckpt.load_consolidated(fresh, out)
    for other in (strict, pretrained, fresh):
        assert bits(logits(other)) == bits(logits(model))
    assert all_bits(fresh.state_dict()) == all_bits(state)


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_that_transformers_wrote_loads(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    fresh = blank(model)
    report = zckpt.load_consolidated(fresh, tmp_path)
    assert all_bits(fresh.state_dict()) == all_bits(model.state_dict())
    assert (report.manifest, report.digests_checked) == (None, False)


def test_the_written_config_describes_the_files(out):
    model = make("llama tied")
    kept = copy.deepcopy(model.config.to_dict())
    zckpt.save_consolidated(model, out, dtype="bf16")
    assert model.config.to_dict() == kept
    config = json.loads((out / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert (out / "generation_config.json").is_file()
    assert {p.dtype for p in type(model).from_pretrained(out).parameters()} == {torch.bfloat16}


def test_a_compiled_model_is_written_as_the_class_it_is(out):
    model = make("gpt2")
    expected = logits(model)
    zckpt.save_consolidated(torch.compile(model, backend="eager"), out)
    config = json.loads((out / "config.json").read_bytes())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert bits(logits(type(model).from_pretrained(out))) == bits(expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama tied"])
def test_a_tie_that_the_config_declares_and_that_is_not_there_is_said(kind, out):
    model = make(kind)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn_like(head.weight))
    report = zckpt.save_consolidated(model, out)
    assert report.aliases == {}
    assert all_bits(stored(out)) == all_bits(model.state_dict())
    assert (report.manifest.ties.declared, report.manifest.ties.actual) == (True, False)
    assert any("tied" in warning for warning in report.warnings)
    assert model.config.tie_word_embeddings is True
    assert json.loads((out / "config.json").read_bytes())["tie_word_embeddings"] is False
    assert bits(logits(type(model).from_pretrained(out))) == bits(logits(model))
    untied = blank(model)
    zckpt.load_consolidated(untied, out)
    assert bits(logits(untied)) == bits(logits(model))


def test_a_tie_by_memory_alone_reloads_with_the_same_logits(out):
    """Two Parameter objects over one memory: stored once, so the config has to say tied."""
    model = make("gpt2")
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.data)
    report = zckpt.save_consolidated(model, out)
    assert report.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert report.manifest.ties.actual
    assert bits(logits(type(model).from_pretrained(out))) == bits(logits(model))


def test_a_tie_that_the_config_does_not_declare_is_said(out):
    model = make("llama untied")
    model.lm_head.weight = model.model.embed_tokens.weight
    report = zckpt.save_consolidated(model, out)
    assert (report.manifest.ties.declared, report.manifest.ties.actual) == (False, True)
    assert any("not tie" in warning for warning in report.warnings)
    fresh = make("llama untied")
    loaded = zckpt.load_consolidated(fresh, out)
    assert sorted(loaded.expanded) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert bits(logits(fresh)) == bits(logits(model))


def test_a_tokenizer_s_files_go_into_the_folder(out):
    class Tokenizer:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer.json").write_text("{}")
            Path(folder, "additional_chat_templates").mkdir()  # as transformers does for several
            Path(folder, "additional_chat_templates", "tool.jinja").write_text("{{ tools }}")

    report = zckpt.save_consolidated(nn.Linear(1, 1), out, tokenizer=Tokenizer())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert out / "tokenizer.json" in report.files
    template = out / "additional_chat_templates" / "tool.jinja"
    assert template in report.files
    assert zckpt.verify(out).is_fine
    template.write_text("{{ other }}")
    assert [f.where for f in zckpt.verify(out).findings] == ["additional_chat_templates/tool.jinja"]


def test_an_alias_called_format_is_kept(out):
    module = nn.Module()
    module.a = nn.Parameter(torch.arange(3.0))
    module.format = module.a
    zckpt.save_consolidated(module, out)
    assert zckpt.verify(out).is_fine
    assert zckpt.open(out)["format"].tolist() == [0.0, 1.0, 2.0]


# ------------------------------------------------------------------ wrappers


class Wrapped(nn.Module):
    """What data-parallel wrappers do: everything is under `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def checkpointed():
    model = net()
    model[2] = checkpoint_wrapper(model[2])
    return model


def partly_compiled():
    model = net()
    model[0] = torch.compile(model[0], backend="eager")
    return model


WRAPPERS = {
    "bare": net,
    "activation checkpoint": checkpointed,
    "part compiled": partly_compiled,
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "module": lambda: Wrapped(net()),
    "DataParallel": lambda: nn.DataParallel(net()),
    "module of compiled": lambda: Wrapped(torch.compile(net(), backend="eager")),
    "compiled module of checkpointed": lambda: torch.compile(
        Wrapped(checkpointed()), backend="eager"
    ),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_leaves_no_trace_in_the_names(kind, out):
    zckpt.save_consolidated(WRAPPERS[kind](), out)
    assert all_bits(stored(out)) == all_bits(net().state_dict())
    net().load_state_dict(dict(zckpt.open(out)), strict=True)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_target_takes_the_names_of_the_bare_one(kind, out):
    zckpt.save_consolidated(net(), out)
    target = WRAPPERS[kind]()
    expected = all_bits(target.state_dict())
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.zero_()
    zckpt.load_consolidated(target, out)
    assert all_bits(target.state_dict()) == expected


def test_a_prefix_that_was_taken_off_is_said(out):
    report = zckpt.save_consolidated(Wrapped(net()), out)
    assert report.manifest.provenance.removed_prefix == "module."
    assert any("'module.'" in warning for warning in report.warnings)


def test_a_child_called_module_beside_others_keeps_its_name(out):
    model = Wrapped(Inner())
    model.head = nn.Linear(2, 2)
    report = zckpt.save_consolidated(model, out)
    assert set(stored(out)) == set(model.state_dict())
    assert report.manifest.provenance.removed_prefix == ""
    assert [b.name for b in report.manifest.unstored_buffers] == ["module.cache"]


def test_names_that_would_collide_are_refused(out):
    model = nn.Module()
    model.fc = nn.Module()
    model.fc.weight = nn.Parameter(torch.ones(1))
    model.fc._orig_mod = nn.Module()
    model.fc._orig_mod.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(NameCollisionError, match=r"fc\._orig_mod\.weight"):
        zckpt.save_consolidated(model, out)
    assert left_in(out.parent) == []


@pytest.mark.parametrize("is_prefixed", [True, False])
def test_a_foreign_file_s_outer_module_is_reconciled(tmp_path, is_prefixed):
    """Written by a stock save of a data-parallel model, or by one that keeps a child `module`."""
    bare, expected = net(), all_bits(net().state_dict())
    if is_prefixed:
        source, target = Wrapped(bare), blank(net())
    else:
        source, target = bare, Wrapped(blank(net()))
    safetensors.torch.save_file(source.state_dict(), tmp_path / ONE)
    report = zckpt.load_consolidated(target, tmp_path)
    inner = target if is_prefixed else target.module
    assert all_bits(inner.state_dict()) == expected
    assert (report.missing, report.unexpected) == ((), ())


def test_no_name_in_common_is_an_error_that_shows_both_sides(tmp_path):
    source = {f"backbone.{n}": t for n, t in net().state_dict().items()}
    safetensors.torch.save_file(source, tmp_path / ONE)
    target = net()
    with pytest.raises(SpecMismatchError, match="no name in common") as caught:
        zckpt.load_consolidated(target, tmp_path, allow_missing=["*"], allow_unexpected=["*"])
    assert "backbone.0.bias" in str(caught.value)
    assert " 0.bias" in str(caught.value)
    assert all_bits(target.state_dict()) == all_bits(net().state_dict())


# ------------------------------------------------------------------ dtype, weights, sizes


@pytest.mark.parametrize(
    "word, dtype",
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_cast_rounds_floating_parameters_once_and_nothing_else(word, dtype, out):
    model = Odd()
    before = all_bits(model.state_dict())
    report = zckpt.save_consolidated(model, out, dtype=word)
    parameters = dict(model.named_parameters())
    expected = {
        name: tensor.to(dtype) if name in parameters else tensor
        for name, tensor in model.state_dict().items()
    }
    assert all_bits(stored(out)) == all_bits(expected)
    assert all_bits(model.state_dict()) == before
    assert f"torch.{report.manifest.provenance.dtype}" == str(dtype)
    fresh = blank(model)
    with pytest.raises(SpecMismatchError, match="allow_cast"):
        zckpt.load_consolidated(fresh, out)
    loaded = zckpt.load_consolidated(fresh, out, allow_cast=True)
    assert set(loaded.cast) == {n for n, p in parameters.items() if p.dtype != dtype}
    assert all_bits(fresh.state_dict()) == all_bits(
        {n: t.to(model.state_dict()[n].dtype) for n, t in expected.items()}
    )


def test_a_plain_module_has_no_masters_so_its_live_values_are_saved(out, tmp_path):
    model = Odd()
    zckpt.save_consolidated(model, out, weights="master")
    report = zckpt.save_consolidated(model, tmp_path / "live", weights="live")
    assert (out / ONE).read_bytes() == (tmp_path / "live" / ONE).read_bytes()
    assert {r.value_from for r in zckpt.open(out).manifest.tensors} == {"live", "frozen"}
    assert report.manifest.provenance.weights == "live"


def test_files_are_split_at_the_size_and_indexed(out):
    model = make("gpt2")
    report = zckpt.save_consolidated(model, out, max_shard_size="2KB", bucket_bytes=500)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    for path in out.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        size_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size_bytes <= 2000 or len(tensors) == 1
    index = json.loads((out / INDEX_NAME).read_bytes())["weight_map"]
    assert index == {
        name: path.name
        for path in out.glob("*.safetensors")
        for name in safetensors.torch.load_file(path)
    }
    assert report.buckets > 2
    assert report.size_bytes == sum(path.stat().st_size for path in report.files)
    assert bits(logits(type(model).from_pretrained(out))) == bits(logits(model))
    fresh = blank(model)
    zckpt.load_consolidated(fresh, out)
    assert all_bits(fresh.state_dict()) == all_bits(model.state_dict())


def test_a_tensor_of_several_chunks_is_copied_whole(out):
    """One larger than the 16 MiB that are handled at a time, with a rest, in the target strided."""
    model = nn.Module()
    model.big = nn.Parameter(torch.arange(5_000_003, dtype=torch.float32).sin())
    zckpt.save_consolidated(model, out)
    assert torch.equal(stored(out)["big"], model.big)
    fresh = nn.Module()
    fresh.big = nn.Parameter(torch.zeros(10_000_006)[::2])
    zckpt.load_consolidated(fresh, out)
    assert torch.equal(fresh.big, model.big)


def test_equal_models_make_equal_bytes(tmp_path):
    for name in ("one", "other"):
        zckpt.save_consolidated(make("gpt2"), tmp_path / name)
    files = left_in(tmp_path / "one")
    assert files == left_in(tmp_path / "other")
    for file in files:
        if file != "zckpt_run.json":
            one, other = (tmp_path / n / file for n in ("one", "other"))
            assert one.read_bytes() == other.read_bytes(), file


# ------------------------------------------------------------------ eval_fn


def test_the_evaluation_is_recorded_exactly(out):
    values = iter([1 / 3])
    report = zckpt.save_consolidated(net(), out, eval_fn=lambda module: next(values))
    record = report.manifest.evaluation
    assert float.fromhex(record.mean.hex) == float(record.mean.decimal) == 1 / 3
    assert record.ranks == (record.mean,)
    assert record.is_of_saved_values
    assert (record.dtype, record.device, record.with_stale_copies) == ("float32", "cpu", None)
    assert zckpt.open(out).manifest.evaluation == record


def test_an_evaluation_of_other_values_than_the_saved_ones_says_so(tmp_path):
    for i, options in enumerate(({"dtype": "bf16"}, {"weights": "master"})):
        report = zckpt.save_consolidated(net(), tmp_path / str(i), eval_fn=lambda m: 1, **options)
        assert report.manifest.evaluation.is_of_saved_values is False


class Busy(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.frozen = nn.Dropout().eval()
        self.calls = 0
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def forward(self, x):
        assert not self.training
        assert not self.linear.training
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.unsaved.add_(1)
        torch.rand(3)
        random.random()
        np.random.rand(3)  # noqa: NPY002 -- the global state is what is tested
        return self.linear(x)


def test_an_evaluation_leaves_no_trace(out):
    model = Busy()
    python, numpy, theirs = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    buffers = dict(model.named_buffers())
    zckpt.save_consolidated(model, out, eval_fn=lambda module: module(torch.ones(2)).sum())
    assert model.training
    assert model.linear.training
    assert not model.frozen.training
    assert model.calls == 0
    assert {n: b.item() for n, b in model.named_buffers()} == dict.fromkeys(buffers, 0.0)
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), theirs)
    assert random.getstate() == python
    assert str(np.random.get_state()) == str(numpy)  # noqa: NPY002
    assert torch.is_grad_enabled()
    assert {n: t.item() for n, t in stored(out).items() if t.numel() == 1} == {
        "in_place": 0.0,
        "replaced": 0.0,
    }


def test_an_evaluation_that_fails_leaves_nothing_behind(out):
    model = Busy()

    def fail(module):
        module(torch.ones(2))
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        zckpt.save_consolidated(model, out, eval_fn=fail)
    assert left_in(out.parent) == []
    assert model.training
    assert model.in_place.item() == 0.0
    zckpt.save_consolidated(model, out)
    old = (out / ONE).read_bytes()
    with pytest.raises(ZeroDivisionError):
        zckpt.save_consolidated(Busy(), out, eval_fn=fail, overwrite=True)
    assert (out / ONE).read_bytes() == old
    assert left_in(out.parent) == ["out"]


# ------------------------------------------------------------------ the folder, bad arguments


def test_an_existing_checkpoint_is_replaced_only_when_asked_to(out):
    zckpt.save_consolidated(net(), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        zckpt.save_consolidated(Odd(), out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    zckpt.save_consolidated(Odd(), out, overwrite=True, max_shard_size=50)
    assert all_bits(stored(out)) == all_bits(Odd().state_dict())
    zckpt.save_consolidated(net(), out, overwrite=True)
    assert set(left_in(out)) == before.keys()
    assert left_in(out.parent) == ["out"]


def test_older_checkpoints_go_after_the_commit(tmp_path):
    for step in (9, 10, 100):
        report = zckpt.save_consolidated(net(), tmp_path / f"checkpoint-{step}", save_total_limit=2)
    assert report.removed == (tmp_path / "checkpoint-9",)
    assert left_in(tmp_path) == ["checkpoint-10", "checkpoint-100"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"weights": "ema"},
        {"weights": None},
        {"dtype": "fp8"},
        {"dtype": "float32"},
        {"dtype": torch.bfloat16},
        {"stale": "ignore"},
        {"max_shard_size": 0},
        {"max_shard_size": -5},
        {"max_shard_size": "-5GB"},
        {"max_shard_size": "huge"},
        {"max_shard_size": "0GB"},
        {"max_shard_size": None},
        {"bucket_bytes": 0},
        {"bucket_bytes": -1},
        {"save_total_limit": 0},
        {"save_total_limit": -1},
        {"save_total_limit": 2},  # the folder is not named checkpoint-<step>
        {"tokenizer": object()},
    ],
    ids=str,
)
def test_a_bad_argument_is_named_and_nothing_is_written(out, arguments):
    (name,) = arguments
    with pytest.raises(UsageError, match=name):
        zckpt.save_consolidated(net(), out, **arguments)
    assert left_in(out.parent) == []


def test_a_module_without_tensors_is_refused(out):
    with pytest.raises(UsageError, match="nothing to save"):
        zckpt.save_consolidated(nn.ReLU(), out)
    assert left_in(out.parent) == []


# ------------------------------------------------------------------ loading: the meta device


def on_meta(factory):
    with torch.device("meta"):
        return factory()


def test_a_meta_target_is_given_memory_and_values(out):
    model = Odd()
    zckpt.save_consolidated(model, out)
    target = copy.deepcopy(model).to("meta")
    report = zckpt.load_consolidated(target, out)
    assert all_bits(target.state_dict()) == all_bits(model.state_dict())
    assert report.left_on_meta == ("frequency",)
    assert report.differing_buffers == ()
    assert target.frequency.is_meta
    assert [p.requires_grad for p in target.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama tied", "t5"])
def test_ties_of_a_meta_target_hold(kind, out):
    model = make(kind)
    zckpt.save_consolidated(model, out)
    target = on_meta(MODELS[kind])
    report = zckpt.load_consolidated(target, out)
    assert all_bits(target.state_dict()) == all_bits(model.state_dict())
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert report.retied
    assert sum(p.numel() for p in target.parameters()) == sum(p.numel() for p in model.parameters())


def test_a_meta_target_stays_meta_when_it_does_not_fit(out):
    zckpt.save_consolidated(net(), out)
    target = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    with pytest.raises(SpecMismatchError):
        zckpt.load_consolidated(target, out)
    assert all(p.is_meta for p in target.parameters())


# ------------------------------------------------------------------ loading: what does not fit


def changed_shape(model):
    model[0] = nn.Linear(2, 4)


def changed_dtype(model):
    model[2].double()


def changed_kind(model):
    model[1].num_batches_tracked = torch.tensor(0.0)


def added(model):
    model.add_module("extra", nn.Linear(1, 1))


def removed(model):
    del model._modules["2"]


@pytest.mark.parametrize(
    "change, names",
    [
        (changed_shape, ["0.weight: shape [4, 2], stored [3, 2]", "0.bias"]),
        (changed_dtype, ["2.weight: float64, stored float32", "2.bias"]),
        (changed_kind, ["1.num_batches_tracked: float32, stored int64"]),
        (added, ["missing from the checkpoint: extra.weight", "extra.bias"]),
        (removed, ["not in the target: 2.weight", "2.bias"]),
    ],
)
def test_what_does_not_fit_is_listed_and_the_target_is_left_alone(out, change, names):
    zckpt.save_consolidated(net(), out)
    target = blank(net())
    change(target)
    before = all_bits(target.state_dict())
    with pytest.raises(SpecMismatchError) as caught:
        zckpt.load_consolidated(target, out)
    for name in names:
        assert name in str(caught.value)
    assert all_bits(target.state_dict()) == before


def test_all_differences_come_at_once(out):
    zckpt.save_consolidated(net(), out)
    target = blank(net())
    for change in (changed_shape, added, removed):
        change(target)
    with pytest.raises(SpecMismatchError, match="6 differences") as caught:
        zckpt.load_consolidated(target, out)
    for name in ("0.weight", "0.bias", "extra.weight", "extra.bias", "2.weight", "2.bias"):
        assert name in str(caught.value)


def test_patterns_permit_names_and_no_others(out):
    zckpt.save_consolidated(net(), out)
    target = blank(net())
    for change in (added, removed):
        change(target)
    kept = bits(target.extra.weight)
    with pytest.raises(SpecMismatchError, match=r"extra\.bias"):
        zckpt.load_consolidated(
            target, out, allow_missing=["extra.weight"], allow_unexpected=["2.*"]
        )
    with pytest.raises(SpecMismatchError, match=r"2\.weight"):
        zckpt.load_consolidated(target, out, allow_missing=["extra.*"], allow_unexpected=["*.bias"])
    assert bits(target[0].weight) != bits(net()[0].weight)
    report = zckpt.load_consolidated(
        target, out, allow_missing=["extra.*"], allow_unexpected=["2.*"]
    )
    assert sorted(report.missing) == ["extra.bias", "extra.weight"]
    assert sorted(report.unexpected) == ["2.bias", "2.weight"]
    assert bits(target[0].weight) == bits(net()[0].weight)
    assert bits(target.extra.weight) == kept


def test_no_pattern_permits_another_shape(out):
    zckpt.save_consolidated(net(), out)
    target = net()
    changed_shape(target)
    with pytest.raises(SpecMismatchError, match="shape"):
        zckpt.load_consolidated(
            target, out, allow_missing=["*"], allow_unexpected=["*"], allow_cast=True
        )


def test_no_permission_casts_whole_numbers(out):
    zckpt.save_consolidated(net(), out)
    target = net()
    changed_kind(target)
    with pytest.raises(SpecMismatchError, match="int64"):
        zckpt.load_consolidated(target, out, allow_cast=True)


def test_a_target_that_cannot_be_written_is_refused_before_anything_is(out):
    """Elements that share their memory: torch refuses to write them, but only when it is there."""
    model = net()
    model.register_buffer("wide", torch.ones(4))
    zckpt.save_consolidated(model, out)
    target = blank(net())
    target.register_buffer("wide", torch.zeros(1).expand(4))
    before = all_bits(target.state_dict())
    with pytest.raises(UnsupportedError, match="wide"):
        zckpt.load_consolidated(target, out)
    assert all_bits(target.state_dict()) == before


# ------------------------------------------------------------------ loading: ties on one side only


def pair(is_tied, one=1.0, other=1.0):
    model = nn.ModuleDict({"x": nn.Linear(2, 2, bias=False), "y": nn.Linear(2, 2, bias=False)})
    with torch.no_grad():
        model["x"].weight.fill_(one)
        model["y"].weight.fill_(other)
    if is_tied:
        model["y"].weight = model["x"].weight
    return model


def test_a_tied_checkpoint_fills_both_of_an_untied_target(out):
    zckpt.save_consolidated(pair(is_tied=True, one=3.0), out)
    target = pair(is_tied=False, one=0.0, other=0.0)
    report = zckpt.load_consolidated(target, out)
    assert report.expanded == ("x.weight", "y.weight")
    assert report.retied == {}
    assert target["x"].weight is not target["y"].weight
    assert all_bits(target.state_dict()) == all_bits(
        pair(is_tied=False, one=3.0, other=3.0).state_dict()
    )


def test_two_equal_stored_tensors_fill_a_tied_target(out):
    zckpt.save_consolidated(pair(is_tied=False, one=3.0, other=3.0), out)
    target = pair(is_tied=True, one=0.0)
    report = zckpt.load_consolidated(target, out)
    assert report.retied == {"y.weight": "x.weight"}
    assert target["x"].weight is target["y"].weight
    assert target["y"].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_two_different_stored_tensors_are_refused_by_a_tied_target(out):
    zckpt.save_consolidated(pair(is_tied=False, one=3.0, other=4.0), out)
    target = pair(is_tied=True, one=0.0)
    with pytest.raises(SpecMismatchError, match=r"ties x\.weight, y\.weight.*untie"):
        zckpt.load_consolidated(target, out)
    assert target["x"].weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("stored_name", ["x.weight", "y.weight"])
def test_a_tied_target_takes_the_one_name_that_a_foreign_file_has(tmp_path, stored_name):
    safetensors.torch.save_file({stored_name: torch.full((2, 2), 3.0)}, tmp_path / ONE)
    target = pair(is_tied=True, one=0.0)
    report = zckpt.load_consolidated(target, tmp_path)
    assert report.missing == ()
    assert target["y"].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


# ------------------------------------------------------------------ loading: damage, buffers


def test_a_flipped_bit_is_refused_and_the_target_left_alone(out):
    zckpt.save_consolidated(net(), out)
    data = bytearray((out / ONE).read_bytes())
    data[-1] ^= 0x10
    (out / ONE).write_bytes(data)
    target = blank(net())
    before = all_bits(target.state_dict())
    with pytest.raises(CorruptCheckpointError, match=ONE):
        zckpt.load_consolidated(target, out)
    assert all_bits(target.state_dict()) == before
    report = zckpt.load_consolidated(target, out, check=False)
    assert report.digests_checked is False
    assert all_bits(target.state_dict()) == all_bits(safetensors.torch.load(bytes(data)))


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_file_is_refused_and_the_target_left_alone(out, keep):
    zckpt.save_consolidated(net(), out)
    (out / ONE).write_bytes((out / ONE).read_bytes()[:keep])
    target = blank(net())
    before = all_bits(target.state_dict())
    with pytest.raises(CorruptCheckpointError, match=ONE):
        zckpt.load_consolidated(target, out, check=False)
    assert all_bits(target.state_dict()) == before


@pytest.mark.parametrize(
    "buffer, said",
    [
        (torch.tensor([0.0, 1, 2, 4]), "frequency: other values"),
        (torch.arange(4.0).bfloat16(), "frequency: bfloat16 now, float32 when saved"),
        (torch.arange(5.0), "frequency: shape [5] now, [4] when saved"),
    ],
)
def test_a_buffer_that_is_not_stored_and_differs_is_named(out, buffer, said):
    zckpt.save_consolidated(Odd(), out)
    target = Odd()
    target.frequency = buffer
    (found,) = zckpt.load_consolidated(target, out).differing_buffers
    assert said in found


def test_a_path_that_is_no_checkpoint_leaves_the_target_alone(tmp_path):
    target = net()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        zckpt.load_consolidated(target, tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match="list"):
        zckpt.load_consolidated([target], tmp_path)
    assert all_bits(target.state_dict()) == all_bits(net().state_dict())
