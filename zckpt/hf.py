"""What a Hugging Face model carries beside its weights: config, generation config, tokenizer, ties.

Everything is asked of the objects themselves; transformers is never imported here.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from zckpt.errors import UsageError
from zckpt.live import LiveModel, class_name, identity
from zckpt.manifest import MANIFEST_NAME, RUN_NAME, TieRecord
from zckpt.plan import FilePlan
from zckpt.spec import DType


class SavesPretrained(Protocol):
    """A tokenizer, processor or the like."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write its files into a folder."""
        ...


def config_of(module: nn.Module) -> Any | None:
    """Return a transformers model's configuration, or None for every other module.

    A wrapper with a `config` of the model inside (PEFT's, a reward model) does not count: its
    tensors have other names than the class that the configuration stands for.
    """
    inner = getattr(module, "_orig_mod", module)
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(inner).__mro__):
        return None
    return getattr(inner, "config", None)


def ties_of(live: LiveModel) -> TieRecord | None:
    """Return whether input and output embeddings are tied by declaration and in fact.

    None where the model has no configuration or not both embeddings. Identity decides, not values.
    """
    config = config_of(live.module)
    ends = [_embedding(live.module, f"get_{end}_embeddings") for end in ("input", "output")]
    if config is None or any(end is None for end in ends):
        return None
    declared = bool(getattr(config, "tie_word_embeddings", False))
    return TieRecord(declared=declared, actual=identity(ends[0]) == identity(ends[1]))


def _embedding(module: nn.Module, getter: str) -> Any | None:
    """Return the weight that a getter leads to; None for a model without that end.

    Such a model has no getter, one that raises NotImplementedError (transformers' own way of saying
    so), or something else of that name that cannot be called without arguments.
    """
    try:
        return getattr(getattr(module, getter)(), "weight", None)
    except (AttributeError, NotImplementedError, TypeError):
        return None


def write_assets(
    live: LiveModel, folder: Path, dtype: DType | None, tokenizer: SavesPretrained | None
) -> None:
    """Write what `from_pretrained(folder)` needs beside the weights. Call on one rank.

    The written config is a copy that describes the files: the dtype of the parameters, the class
    that was saved, and `tie_word_embeddings` as the tensors really are.

    Raises:
        UsageError: the tokenizer or processor has no `save_pretrained`.
    """
    config, ties = config_of(live.module), ties_of(live)
    if config is not None:
        written = copy.deepcopy(config)
        written.architectures = [class_name(live.module)]
        if dtype is not None:
            name = "dtype" if hasattr(written, "dtype") else "torch_dtype"
            setattr(written, name, dtype.name)
        if ties is not None and ties.declared and not ties.actual:
            written.tie_word_embeddings = False
        written.save_pretrained(str(folder))
    generation = getattr(live.module, "generation_config", None)
    if config is not None and generation is not None:
        generation.save_pretrained(str(folder))
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained"):
            raise UsageError(
                f"tokenizer is a {type(tokenizer).__name__} without save_pretrained; pass a "
                "Hugging Face tokenizer or processor."
            )
        tokenizer.save_pretrained(str(folder))


# ------------------------------------------------------------------ files of a model's folder


_ASSET_SUFFIXES = {".jinja", ".json", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab"}
_NO_ASSETS = {MANIFEST_NAME, RUN_NAME, "trainer_state.json", "adapter_config.json"}


def copy_assets(source: Path, folder: Path, plan: FilePlan) -> tuple[str, ...]:
    """Copy a model's config, generation config and tokenizer files beside converted weights.

    The copied config describes the files: the dtype of their parameters, and no tied embeddings
    where `lm_head.weight` is a tensor of its own. Weights, indices of weights and states of
    training are not copied. Returns warnings.

    Raises:
        UsageError: the config is no JSON.
    """
    for path in sorted(source.iterdir()):
        is_asset = path.suffix in _ASSET_SUFFIXES and path.name not in _NO_ASSETS
        if path.is_file() and is_asset and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    templates = source / "additional_chat_templates"  # transformers' folder of them
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_text("utf-8"))
        described = dict(config)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{source / 'config.json'} is no JSON object: {error}") from None
    if plan.main_dtype is not None:
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        described[name] = plan.main_dtype.name
    warnings = []
    if config.get("tie_word_embeddings") is True and "lm_head.weight" in plan.tensors:
        described["tie_word_embeddings"] = False
        warnings.append(UNTIED)
    config_path.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", "utf-8")
    return tuple(warnings)


UNTIED = (
    "the config declares tied word embeddings but they are two tensors; both were saved and "
    "config.json says tie_word_embeddings=false."
)
