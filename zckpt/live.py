"""What a live model is made of: names, shared tensors, partitions, gathered copies, masters.

The only module that knows DeepSpeed's attributes. It reads them from the objects themselves and
needs deepspeed neither installed nor imported. Nothing here gathers, writes or calls a collective;
sources read and targets fill what this module points at.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zckpt import digests
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.manifest import Digest, LeftOut, ValueFrom
from zckpt.names import choose_owner, clean_names, listed, without_wrappers
from zckpt.spec import DTYPES, AliasGroup, DType, Role, TensorSpec

SourceKind = Literal["engine", "zero.Init module", "module"]

CHUNK_BYTES = 1 << 20
"""Bytes read, cast, hashed or written at a time. They stay in the processor's cache from one to the
next; and ranks that write into one file at 16 MiB a call wait for each other ten times as long."""


# ------------------------------------------------------------------ dtypes and bytes


def dtype_of(tensor: Tensor, name: str) -> DType:
    """Return the storable dtype of a tensor, or raise an `UnsupportedError` that names it."""
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {word}, which a safetensors file cannot hold; convert it to one of "
            f"{', '.join(DTYPES)}."
        )
    return DTYPES[word]


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's object for a storable dtype."""
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def as_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of a contiguous 1-D CPU tensor without copying them; writable."""
    plain = flat.detach().resolve_conj().resolve_neg()
    return memoryview(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest_of_tensor(tensor: Tensor) -> Digest:
    """Return the digest of a tensor's bytes in row-major order, reading 1 MiB at a time."""
    flat = tensor.detach().reshape(-1)
    spec = TensorSpec(
        name="", shape=tuple(flat.shape), dtype=dtype_of(flat, "a tensor"), role="buffer"
    )
    return digests.of_tensor(
        [
            digests.of_block(
                as_bytes(flat[start:end].cpu().contiguous())
                for start, end in chunks(block.start, block.end, flat.element_size())
            )
            for block in digests.blocks_of(spec)
        ]
    )


def chunks(start: int, end: int, element_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the element range `[start, end)` in ranges of at most `CHUNK_BYTES`."""
    step = CHUNK_BYTES // element_bytes
    for first in range(start, end, step):
        yield first, min(first + step, end)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and size hold the same bits (NaN equals the same NaN)."""
    return torch.equal(_as_bits(one), _as_bits(other))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


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


def is_partitioned(tensor: Tensor) -> bool:
    """Whether a parameter was converted by `zero.Init`, by the attributes that leaves on it."""
    return hasattr(tensor, "ds_id") and getattr(tensor, "ds_tensor", None) is not None


@dataclass(frozen=True)
class Partition:
    """This rank's element range of a partitioned parameter.

    Rank r of the partition group holds elements `[r * p, (r + 1) * p)` of the flattened parameter,
    p being the size of `ds_tensor`; the last ranks' ranges are cut to the parameter's end, and what
    lies behind is padding (deepspeed/runtime/zero/partition_parameters.py, `_partition_param`).
    """

    values: Tensor
    """1-D view of `ds_tensor` without padding."""
    start: int
    """Element of the flattened parameter that `values[0]` is."""


def partition_of(parameter: Any, name: str) -> Partition:
    """Return this rank's partition, after checking that it lies as DeepSpeed says it does."""
    held = parameter.ds_tensor
    rank, ranks = _rank_in(partition_group(parameter))
    numel, size = int(parameter.ds_numel), int(held.numel())
    if hasattr(held, "ds_quant_scale"):
        raise UnsupportedError(f"{name} is held in quantized partitions, which cannot be filled.")
    if getattr(held, "final_location", None) == "nvme":
        raise UnsupportedError(
            f"the partitions of {name} live on NVMe, which cannot be filled in place; load the "
            "checkpoint before deepspeed.initialize."
        )
    if size != -(-numel // ranks):
        raise LayoutError(
            f"{name} has {numel} elements on {ranks} ranks, so a partition must hold "
            f"{-(-numel // ranks)}; this rank's holds {size}."
        )
    start = min(rank * size, numel)
    return Partition(held.view(-1)[: min(size, numel - start)], start)


def partition_group(parameter: Any) -> Any:
    """Return the process group over which a parameter is partitioned (under MiCS, a sub-group)."""
    comm = getattr(parameter, "comm", None)
    return parameter.ds_process_group if comm is None else comm.param_shard_group


def _rank_in(group: Any) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(group=group), dist.get_world_size(group=group)


# ------------------------------------------------------------------ masters


@dataclass(frozen=True)
class Master:
    """This rank's part of a parameter's fp32 master."""

    values: Tensor
    """1-D view into the optimizer's own memory: writing to it changes the master."""
    start: int
    """Element of the flattened parameter that `values[0]` is."""
    group: Any
    """Process group whose ranks together hold the whole master; None where each rank does."""


_FLAT_GROUPS = {
    "DeepSpeedZeroOptimizer": (
        "bit16_groups",
        "bit16_groups_flat",
        "parallel_partitioned_bit16_groups",
        "single_partition_of_fp32_groups",
    ),
    "BF16_Optimizer": (
        "bf16_groups",
        "bf16_groups_flat",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
    ),
}
"""Per optimizer class: its parameters, their flat 16-bit buffers, the ranks' views into those, and
this rank's fp32 copy of its view. One list item per parameter group."""


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, Master]]:
    """Yield (parameter, this rank's part of its master) for every parameter that has one."""
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    if "DeepSpeedZeroOptimizer_Stage3" in kinds:
        yield from _stage_3_masters(optimizer)
    elif flat := kinds & _FLAT_GROUPS.keys():
        yield from _flat_group_masters(optimizer, _FLAT_GROUPS[flat.pop()])
    elif "FP16_Optimizer" in kinds:
        groups = zip(
            optimizer.fp16_groups,
            optimizer.fp16_groups_flat,
            optimizer.fp32_groups_flat,
            strict=True,
        )
        for parameters, flat16, flat32 in groups:
            for parameter in parameters:
                start = _offset_in(flat16, parameter)
                values = flat32.detach()[start : start + parameter.numel()]
                yield parameter, Master(values, 0, None)
    elif "FP16_UnfusedOptimizer" in kinds:
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, Master(master.detach().view(-1), 0, None)


def _stage_3_masters(optimizer: Any) -> Iterator[tuple[Tensor, Master]]:
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            index, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            if optimizer._swappable_optimizer_subgroup(index):
                raise UnsupportedError(
                    "the optimizer's masters are swapped to NVMe, where zckpt cannot reach them; "
                    "save with weights='live', and load before deepspeed.initialize."
                )
            flat = optimizer.fp32_partitioned_groups_flat[index].detach()
            group = partition_group(parameter)
            start = min(_rank_in(group)[0] * size, parameter.ds_numel)
            numel = min(size, parameter.ds_numel - start)
            yield parameter, Master(flat[offset : offset + numel], start, group)


def _flat_group_masters(
    optimizer: Any, attributes: tuple[str, str, str, str]
) -> Iterator[tuple[Tensor, Master]]:
    """Find each parameter's master by where its memory lies in the flat group.

    Parameters of stage 1 and 2 are views into a flat buffer, and a rank's fp32 copy mirrors one
    contiguous part of it. Pointers show the order whatever it is (round-robin groups reorder it).
    """
    groups = zip(*(getattr(optimizer, name) for name in attributes), strict=True)
    for index, (parameters, flat16, partitions, flat32) in enumerate(groups):
        process_group = optimizer.real_dp_process_group[index]
        own = partitions[_rank_in(process_group)[0]]
        own_start = _offset_in(flat16, own)
        own_end = own_start + flat32.numel()
        for parameter in parameters:
            start = _offset_in(flat16, parameter)
            first = max(start, own_start)
            last = max(first, min(start + parameter.numel(), own_end))
            values = flat32.detach().view(-1)[first - own_start : last - own_start]
            yield parameter, Master(values, min(first - start, parameter.numel()), process_group)


def _offset_in(flat: Tensor, part: Tensor) -> int:
    """Return the element of `flat` at which the memory of `part` begins."""
    distance = part.data_ptr() - flat.data_ptr()
    if part.numel() == 0:
        return 0
    start, rest = divmod(distance, flat.element_size())
    if rest or start < 0 or start + part.numel() > flat.numel():
        raise LayoutError(
            f"a parameter of shape {tuple(part.shape)} does not lie in its optimizer's flat "
            "buffer: it was replaced or moved after deepspeed.initialize, so its master is unknown."
        )
    return start


def _owned(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters of the model that an engine's optimizer trains."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups is not None:
            for group in groups:
                yield from group
            return
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


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
        return None if optimizer is None or is_offload(optimizer) else optimizer

    @property
    def optimizer_name(self) -> str | None:
        """Class of the optimizer inside DeepSpeed's wrappers."""
        if self.optimizer is None:
            return None
        return type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__

    @cached_property
    def masters(self) -> Mapping[int, Master]:
        """This rank's part of each fp32 master, by `id` of the parameter."""
        return {id(parameter): master for parameter, master in _masters(self.optimizer)}

    @cached_property
    def owned(self) -> frozenset[int]:
        """`id` of every parameter that the engine's optimizer trains."""
        return frozenset(id(parameter) for parameter in _owned(self.optimizer))

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
        if optimizer is not None and is_offload(optimizer):
            return optimizer
        return getattr(optimizer, "parameter_offload", None)


def is_offload(candidate: object) -> bool:
    """Whether an engine's `optimizer` is only the parameter-gathering half of stage 3."""
    return type(candidate).__name__ == "DeepSpeedZeRoOffload"


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
        return LiveModel(_without_data_parallel(target))
    raise UnsupportedError(
        f"expected a DeepSpeed engine or a torch.nn.Module, got {type(target).__name__}."
    )


def _is_engine(target: Any) -> bool:
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(target, deepspeed.DeepSpeedEngine)


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
    for name, parameter in module.named_parameters():
        if is_partitioned(parameter) and id(parameter) not in reached:
            left_out += [
                LeftOut(name=n, reason="made by a state-dict hook from a partitioned parameter")
                for n, value in found.items()
                if id(value) not in registered and value.numel() == 0
            ]
            found[name] = parameter
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
    )


def _tied_patterns(module: nn.Module, removed_prefix: str) -> Iterator[str]:
    """Yield the names that Hugging Face drops from files because they are tied to another.

    `_tied_weights_keys` is a list of names or patterns before transformers 5 and a mapping from the
    dropped name to the kept one since.
    """
    for path, child in module.named_modules():
        for pattern in getattr(child, "_tied_weights_keys", None) or ():
            yield without_wrappers(f"{path}.{pattern}".lstrip(".")).removeprefix(removed_prefix)


# ------------------------------------------------------------------ gathered copies set aside


_AVAILABLE, _NOT_AVAILABLE = "AVAILABLE", "NOT_AVAILABLE"
_CONTEXT_DEPTH = "_ds_z3_gathered_param_context_depth"


def gathered_copy(parameter: Any) -> Tensor | None:
    """Return the full copy of a partitioned parameter that this rank holds now, or None."""
    if parameter.ds_status.name != _AVAILABLE:
        return None
    copy = parameter.data
    assert isinstance(copy, Tensor)
    return copy


@contextlib.contextmanager
def set_aside(parameters: list[Any], *, hide: bool = True) -> Iterator[None]:
    """Make partitioned parameters look released, and put everything back afterwards.

    With `hide=False` they are only put back: the block sees the copies, stale or not.

    Whatever is gathered stays untouched in memory: inside the block a gather reads the partitions,
    afterwards training sees the very tensors, statuses and counters it saw before, stale or not.
    In-flight gathers go on; they write to buffers of their own.
    """
    kept = [_Kept.of(parameter) for parameter in parameters]
    try:
        if hide:
            for item in kept:
                item.hide()
        yield
    finally:
        for item in kept:
            item.put_back()


@dataclass(frozen=True)
class _Kept:
    parameter: Any
    data: Tensor
    status: Any
    active: set[int]
    secondary: Any
    depth: Any

    @classmethod
    def of(cls, parameter: Any) -> _Kept:
        return cls(
            parameter=parameter,
            data=parameter.data,
            status=parameter.ds_status,
            active=set(parameter.ds_active_sub_modules),
            secondary=getattr(parameter, "ds_secondary_tensor", None),
            depth=getattr(parameter, _CONTEXT_DEPTH, None),
        )

    def hide(self) -> None:
        parameter = self.parameter
        if self.status.name != _NOT_AVAILABLE:
            parameter.data = torch.empty(0, dtype=self.data.dtype, device=self.data.device)
            parameter.ds_status = type(self.status)[_NOT_AVAILABLE]
        parameter.ds_active_sub_modules.clear()
        if self.depth is not None:
            delattr(parameter, _CONTEXT_DEPTH)

    def put_back(self) -> None:
        parameter = self.parameter
        parameter.data = self.data
        parameter.ds_status = self.status
        parameter.ds_active_sub_modules.clear()
        parameter.ds_active_sub_modules.update(self.active)
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = self.secondary
        if self.depth is not None:
            setattr(parameter, _CONTEXT_DEPTH, self.depth)
