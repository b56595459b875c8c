"""A live model: the module, the engine around it, and the tensors it consists of.

Names come from `state_dict()`, identity from the objects: `ds_id` for partitioned parameters, else
the memory they cover. Nothing here gathers, writes or calls a collective.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zckpt import zero
from zckpt.errors import UnsupportedError
from zckpt.manifest import LeftOut, ValueFrom
from zckpt.names import choose_owner, clean_names, listed, without_wrappers
from zckpt.spec import AliasGroup, Role, TensorSpec
from zckpt.tensors import dtype_of
from zckpt.zero import Master, is_partitioned

SourceKind = Literal["engine", "zero.Init module", "module"]


# ------------------------------------------------------------------ entries


@dataclass(frozen=True)
class Entry:
    """One distinct tensor of a live model, under all its names."""

    group: AliasGroup
    tensor: Tensor
    role: Role
    is_registered: bool
    """Whether the tensor is a parameter or buffer of the module, not made by a hook."""

    @property
    def name(self) -> str:
        """The owner."""
        return self.group.owner

    @property
    def is_partitioned(self) -> bool:
        """Whether ZeRO-3 holds the tensor in partitions."""
        return is_partitioned(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, also of a partitioned parameter."""
        return tuple(getattr(self.tensor, "ds_shape", self.tensor.shape))

    @property
    def spec(self) -> TensorSpec:
        """Name, full shape, live dtype and role."""
        held = getattr(self.tensor, "ds_tensor", self.tensor)
        dtype = dtype_of(self.tensor if hasattr(held, "ds_quant_scale") else held, self.name)
        return TensorSpec(name=self.name, shape=self.shape, dtype=dtype, role=self.role)


# ------------------------------------------------------------------ the live model


@dataclass(frozen=True)
class LiveModel:
    """A module and, where there is one, the DeepSpeed engine around it."""

    module: nn.Module
    engine: Any = None

    @cached_property
    def _state(self) -> _State:
        return _read_state(self.module)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every distinct tensor of `state_dict()`, in its order."""
        return self._state.entries

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What `state_dict()` has and a file of tensors cannot hold."""
        return self._state.left_out

    @property
    def removed_prefix(self) -> str:
        """The outermost `module.` that was taken off every name, or nothing."""
        return self._state.removed_prefix

    @property
    def unstored_buffers(self) -> dict[str, Tensor]:
        """Non-persistent buffers by cleaned name."""
        return self._state.unstored_buffers

    @property
    def kind(self) -> SourceKind:
        """What was given."""
        if self.engine is not None:
            return "engine"
        partitioned = any(is_partitioned(p) for p in self.module.parameters())
        return "zero.Init module" if partitioned else "module"

    @property
    def partitioned(self) -> tuple[Entry, ...]:
        """The entries that ZeRO-3 holds in partitions."""
        return tuple(entry for entry in self.entries if entry.is_partitioned)

    @property
    def zero_stage(self) -> int | None:
        """The engine's ZeRO stage, or None without an engine."""
        return None if self.engine is None else int(self.engine.zero_optimization_stage())

    @property
    def optimizer(self) -> Any:
        """The engine's own optimizer object, or None. Never the user's other optimizers."""
        optimizer = getattr(self.engine, "optimizer", None)
        return None if optimizer is None or zero.is_offload(optimizer) else optimizer

    @property
    def optimizer_name(self) -> str | None:
        """Class of the optimizer inside DeepSpeed's wrappers."""
        if self.optimizer is None:
            return None
        return type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__

    @cached_property
    def masters(self) -> Mapping[int, Master]:
        """This rank's part of each fp32 master, by `id` of the parameter."""
        return {id(parameter): master for parameter, master in zero.masters_of(self.optimizer)}

    @cached_property
    def owned(self) -> frozenset[int]:
        """`id` of every parameter that the engine's optimizer trains."""
        return frozenset(id(parameter) for parameter in zero.parameters_of(self.optimizer))

    def value_from(self, entry: Entry, weights: Literal["live", "master"]) -> ValueFrom:
        """Return what the saved value of an entry is a copy of."""
        if entry.role != "parameter":
            return "live"
        if not entry.tensor.requires_grad:
            return "frozen"
        if weights == "master" and id(entry.tensor) in self.masters:
            return "master"
        if self.engine is not None and id(entry.tensor) not in self.owned:
            return "unowned"
        return "live"

    @property
    def offload(self) -> Any:
        """DeepSpeed's object that gathers and releases parameters, or None below stage 3."""
        optimizer = getattr(self.engine, "optimizer", None)
        if optimizer is not None and zero.is_offload(optimizer):
            return optimizer
        return getattr(optimizer, "parameter_offload", None)


def look_at(target: Any) -> LiveModel:
    """Return the live model of an engine or module.

    Raises:
        UnsupportedError: it is neither, or an engine whose ranks hold different models (pipeline,
            tensor or expert parallelism).
    """
    if _is_engine(target):
        _refuse_split_models(target)
        return LiveModel(_without_data_parallel(target.module), target)
    if isinstance(target, nn.Module):
        module = _without_data_parallel(target)
        engine = _engine_around(module)
        if engine is not None:
            _refuse_split_models(engine)
        return LiveModel(module, engine)
    raise UnsupportedError(
        f"expected a DeepSpeed engine or a torch.nn.Module, got {type(target).__name__}."
    )


def _is_engine(target: Any) -> bool:
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(target, deepspeed.DeepSpeedEngine)


def _engine_around(module: nn.Module) -> Any:
    """Return the living DeepSpeed engine that trains a module, or a module it is part of, if any.

    Its optimizer holds masters of the parameters: weights that are filled without them would be
    undone by the next step. Nothing on the module leads to the engine, so the garbage collector's
    list of objects is searched (0.1 s in a large process).
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None:
        return None
    engines = _engines_of(module, deepspeed.DeepSpeedEngine)
    if len(engines) > 1:
        gc.collect()  # one that is only waiting to be collected does not count
        engines = _engines_of(module, deepspeed.DeepSpeedEngine)
    if len(engines) > 1:
        raise UnsupportedError(
            f"{len(engines)} engines hold this module, each with an optimizer of its own; pass the "
            "engine that is meant."
        )
    return engines[0] if engines else None


def _engines_of(module: nn.Module, engine_class: type) -> list[Any]:
    engines = [o for o in gc.get_objects() if issubclass(type(o), engine_class)]
    return [
        engine
        for engine in engines
        if (held := getattr(engine, "module", None)) is not None
        and any(child is module for child in held.modules())
    ]


def class_name(module: nn.Module) -> str:
    """Return the name of the class that was written, not of a compiler's wrapper around it."""
    return type(getattr(module, "_orig_mod", module)).__name__


def _without_data_parallel(module: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(module, wrappers):
        module = module.module
    return module


def _refuse_split_models(engine: Any) -> None:
    if any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__):
        raise UnsupportedError("pipeline engines are not supported: each rank holds other layers.")
    mpu = getattr(engine, "mpu", None)
    width = 1 if mpu is None else _tensor_parallel_width(mpu)
    autotp = getattr(engine, "autotp_size", None)
    width = max(width, 1 if autotp is None else int(autotp()))
    if width > 1:
        raise UnsupportedError(
            f"tensor parallelism over {width} ranks is not supported: each rank holds a part of a "
            "tensor that ZeRO does not know about."
        )
    experts = [
        n for n, p in engine.module.named_parameters() if getattr(p, "allreduce", True) is False
    ]
    if experts:
        raise UnsupportedError(
            f"expert-parallel parameters are not supported: {listed(experts)} differ between ranks."
        )


def _tensor_parallel_width(mpu: Any) -> int:
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


# ------------------------------------------------------------------ reading the state dict


@dataclass(frozen=True)
class _State:
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...]
    removed_prefix: str
    unstored_buffers: dict[str, Tensor] = field(default_factory=dict)


def _read_state(module: nn.Module) -> _State:
    """Read names from `state_dict()` itself, so that its hooks have had their say.

    With `keep_vars=True` the values are the module's own objects, whose identity tells what is
    shared: `ds_id` for partitioned parameters, else the memory they cover.
    """
    values = module.state_dict(keep_vars=True)
    registered = {id(p) for p in module.parameters()} | {id(b) for b in module.buffers()}
    left_out: list[LeftOut] = []
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            left_out.append(LeftOut(name=name, reason=f"a {type(value).__name__}, not a tensor"))
        else:
            found[name] = value
    reached = {id(value) for value in found.values()}
    made = {name: value for name, value in found.items() if id(value) not in registered}
    placeholders = [name for name, value in made.items() if not value.numel()]
    unreached = {n: p for n, p in module.named_parameters() if id(p) not in reached}
    if placeholders and any(map(is_partitioned, unreached.values())):
        # A hook copied what ZeRO-3 leaves of a released parameter: the parameter itself is stored.
        found |= {n: p for n, p in unreached.items() if is_partitioned(p)}
        reason = "made by a state-dict hook from a partitioned parameter"
        left_out += [LeftOut(name=name, reason=reason) for name in placeholders]
    elif not made:
        left_out += [LeftOut(name=n, reason="removed by a state-dict hook") for n in unreached]
    dropped = {left.name for left in left_out}
    found = {name: value for name, value in found.items() if name not in dropped}

    _refuse_unreadable(found)
    cleaned, prefix = clean_names(list(found))
    persistent = {id(value) for value in found.values()}
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if id(buffer) not in persistent
    }
    return _State(
        entries=tuple(_group(found, cleaned, list(_tied_patterns(module, prefix)), registered)),
        left_out=tuple(left_out),
        removed_prefix=prefix,
        unstored_buffers={
            without_wrappers(name).removeprefix(prefix): buffer for name, buffer in buffers.items()
        },
    )


def _refuse_unreadable(found: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        if nn.parameter.is_lazy(tensor):
            raise UnsupportedError(f"{name} is lazy and has no shape yet; run the model once.")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnsupportedError(f"{name} is sparse or quantized, which safetensors cannot hold.")


def _group(
    found: Mapping[str, Tensor],
    names: list[str],
    tied_patterns: list[str],
    registered: set[int],
) -> Iterator[Entry]:
    originals, tensors = list(found), list(found.values())
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(identity(tensor), []).append(index)
    for members in groups.values():
        first = members[0]
        yield Entry(
            group=choose_owner([names[i] for i in members], tied_patterns),
            tensor=tensors[first],
            role=_role(tensors[first], originals[first]),
            is_registered=id(tensors[first]) in registered,
        )


def _role(tensor: Tensor, name: str) -> Role:
    if isinstance(tensor, nn.Parameter):
        return "parameter"
    return "extra_state" if name.rsplit(".", 1)[-1] == "_extra_state" else "buffer"


def identity(tensor: Any) -> object:
    """Return a key that is equal for two names exactly when they mean the same values."""
    if is_partitioned(tensor):
        return ("ds_id", tensor.ds_id)
    if tensor.numel() == 0 or tensor.is_meta:
        return ("object", id(tensor))
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _tied_patterns(module: nn.Module, removed_prefix: str) -> Iterator[str]:
    """Yield the names that Hugging Face drops from files because they are tied to another.

    `_tied_weights_keys` is a list of names or patterns before transformers 5 and a mapping from the
    dropped name to the kept one since.
    """
    for path, child in module.named_modules():
        for pattern in getattr(child, "_tied_weights_keys", None) or ():
            yield without_wrappers(f"{path}.{pattern}".lstrip(".")).removeprefix(removed_prefix)
