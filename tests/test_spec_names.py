"""Names and specs: pure functions, checked against torch's own names and transformers' own rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zckpt.errors import NameCollisionError
from zckpt.names import (
    choose_owner,
    clean_names,
    listed,
    matches_any,
    reconcile_prefix,
    without_wrappers,
)
from zckpt.spec import DTYPES, DTYPES_BY_CODE, AliasGroup, Span, TensorSpec
from zckpt.tensors import torch_dtype

# ------------------------------------------------------------------ spec


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_a_dtype_is_what_torch_says_it_is(dtype):
    found = torch_dtype(dtype)
    assert dtype.size_bytes == torch.empty(0, dtype=found).element_size()
    assert dtype.is_floating == found.is_floating_point
    assert DTYPES_BY_CODE[dtype.code] is dtype


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from(sorted(DTYPES)))
def test_numel_and_bytes_are_those_of_the_tensor(shape, dtype):
    spec = TensorSpec(name="x", shape=tuple(shape), dtype=DTYPES[dtype], role="buffer")
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    assert spec.numel == tensor.numel() == math.prod(shape)
    assert spec.size_bytes == tensor.numel() * tensor.element_size()


def test_an_alias_group_lists_its_owner_first():
    assert AliasGroup("a", ("c", "b")).names == ("a", "c", "b")
    assert Span(8, 20).size_bytes == 12


# ------------------------------------------------------------------ clean_names


@pytest.mark.parametrize(
    "name, expected",
    [
        ("_orig_mod.fc.weight", "fc.weight"),
        ("fc._checkpoint_wrapped_module.weight", "fc.weight"),
        ("a._orig_mod._checkpoint_wrapped_module.b._orig_mod.weight", "a.b.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("a._orig_mod_2.weight", "a._orig_mod_2.weight"),
        ("weight", "weight"),
    ],
)
def test_wrapper_segments_go_wherever_they_stand(name, expected):
    assert without_wrappers(name) == expected


def test_the_names_of_a_compiled_and_checkpointed_model_become_those_of_the_bare_one():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def bare():
        return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))

    wrapped = bare()
    wrapped[0] = torch.compile(wrapped[0], backend="eager")
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    wrapped = torch.compile(wrapped, backend="eager")
    names = [name for name, _ in wrapped.named_parameters()]
    assert any("_orig_mod" in n for n in names)
    assert any("_checkpoint_wrapped_module" in n for n in names)
    assert clean_names(names) == (list(bare().state_dict()), "")


def test_an_outermost_module_goes_when_every_name_has_it():
    names = ["module.a.weight", "module.b.module.weight"]
    assert clean_names(names) == (["a.weight", "b.module.weight"], "module.")


def test_an_outermost_module_is_seen_behind_a_wrapper():
    names = ["_orig_mod.module._orig_mod.a", "_orig_mod.module.b"]
    assert clean_names(names) == (["a", "b"], "module.")


def test_only_one_module_level_goes():
    assert clean_names(["module.module.a"]) == (["module.a"], "module.")


def test_a_child_called_module_beside_others_keeps_its_name():
    names = ["module.weight", "head.weight"]
    assert clean_names(names) == (names, "")
    assert clean_names(["module_list.0", "module.0"]) == (["module_list.0", "module.0"], "")


def test_no_names_have_no_prefix():
    assert clean_names([]) == ([], "")


def test_two_names_that_become_one_are_refused_by_name():
    with pytest.raises(NameCollisionError) as caught:
        clean_names(["fc.weight", "other", "fc._orig_mod.weight"])
    for name in ("'fc.weight'", "'fc._orig_mod.weight'"):
        assert name in str(caught.value)


# ------------------------------------------------------------------ choose_owner


@pytest.mark.parametrize(
    "names, patterns, owner, aliases",
    [
        (["wte.weight", "lm_head.weight"], ["lm_head.weight"], "wte.weight", ("lm_head.weight",)),
        (["lm_head.weight", "wte.weight"], ["lm_head.weight"], "wte.weight", ("lm_head.weight",)),
        # a mapping from the dropped name to the kept one is iterated by its keys
        (
            ["encoder.embed.weight", "shared.weight", "decoder.embed.weight"],
            {"encoder.embed.weight": "shared.weight", "decoder.embed.weight": "shared.weight"},
            "shared.weight",
            ("encoder.embed.weight", "decoder.embed.weight"),
        ),
        (["a", "b"], [], "a", ("b",)),
        (["a", "b"], ["a", "b"], "a", ("b",)),
        (["only"], ["only"], "only", ()),
        # transformers searches, it does not match from the beginning
        (
            ["model.decoder.out.weight", "emb"],
            [r"out\.weight$"],
            "emb",
            ("model.decoder.out.weight",),
        ),
        (["x.bias", "y.bias"], [r"x\.\d+\.bias"], "x.bias", ("y.bias",)),
    ],
)
def test_the_owner_is_the_first_name_that_is_not_declared_tied(names, patterns, owner, aliases):
    assert choose_owner(names, patterns) == AliasGroup(owner, aliases)


# ------------------------------------------------------------------ reconcile_prefix


@pytest.mark.parametrize(
    "source, target, expected",
    [
        (["module.a", "module.b"], ["a", "b"], ("module.", "")),
        (["a", "b"], ["module.a", "module.b"], ("", "module.")),
        (["module.a", "b"], ["a", "b"], ("", "")),  # one name in common: nothing is touched
        (["module.a", "c"], ["a", "b"], ("", "")),  # not every name has it
        (["module.a"], ["module.a"], ("", "")),
        (["model.a"], ["a"], ("", "")),  # no other prefix is ever guessed
        (["modules.a"], ["a"], ("", "")),
        ([], ["module.a"], ("", "")),
        (["module.a"], [], ("", "")),
    ],
)
def test_only_an_outermost_module_is_reconciled(source, target, expected):
    assert reconcile_prefix(source, target) == expected
    assert reconcile_prefix(iter(source), iter(target)) == expected


# ------------------------------------------------------------------ matches_any, listed


@pytest.mark.parametrize(
    "name, patterns, expected",
    [
        ("lm_head.weight", ["lm_head.*"], True),
        ("model.lm_head.weight", ["lm_head.*"], False),
        ("layers.3.weight", ["layers.[0-4].weight"], True),
        ("layers.3.weight", ["layers.?.bias", "*.weight"], True),
        ("LM_HEAD.weight", ["lm_head.*"], False),
        ("lm_head.weight", ["lm_head"], False),
        ("anything", [], False),
    ],
)
def test_a_pattern_matches_all_of_a_name(name, patterns, expected):
    assert matches_any(name, patterns) is expected


def test_long_lists_of_names_are_cut_with_a_count():
    assert listed(["a", "b"]) == "a, b"
    assert listed(map(str, range(8))) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(map(str, range(11)), most=2) == "0, 1 and 9 more"
    assert listed([]) == ""
