"""What DeepSpeed leaves on a model: partitions, gathered copies, fp32 masters.

The only module that knows the attributes of partitioned parameters and of DeepSpeed's optimizers.
It reads them from the objects themselves and needs deepspeed neither installed nor imported.
Nothing here gathers or calls a collective: sources read and targets fill what it points at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zckpt.errors import LayoutError, UnsupportedError

# ------------------------------------------------------------------ partitions


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


def masters_of(optimizer: Any) -> Iterator[tuple[Tensor, Master]]:
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


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters of the model that an engine's optimizer trains."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups is not None:
            for group in groups:
                yield from group
            return
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def is_offload(candidate: object) -> bool:
    """Whether an engine's `optimizer` is only the parameter-gathering half of stage 3."""
    return type(candidate).__name__ == "DeepSpeedZeRoOffload"
