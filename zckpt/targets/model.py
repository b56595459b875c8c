"""Fill a live model: plain tensors, ZeRO-3 partitions, gathered copies, fp32 masters.

No gather, no broadcast: each rank asks for the element ranges that it holds and writes them in
place. What the optimizer would write back at its next step, the masters, is filled too, so that a
step at learning rate 0 leaves the weights as they were loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zckpt.errors import UnsupportedError
from zckpt.live import Entry, LiveModel
from zckpt.names import listed, without_wrappers
from zckpt.tensors import CHUNK_BYTES
from zckpt.zero import gathered_copy, partition_of

Read = Callable[[int, int], Tensor]
"""Returns elements `[start, end)` of one flattened tensor."""


def check_fillable(live: LiveModel) -> None:
    """Raise, before anything is changed, for tensors that this target cannot fill.

    Raises:
        UnsupportedError: a tensor that a state-dict hook makes, or partitions out of reach.
        LayoutError: partitions or masters that do not lie where DeepSpeed says.
    """
    made = [e.name for e in live.entries if not e.is_registered and e.role != "extra_state"]
    if made:
        raise UnsupportedError(
            f"made by a state-dict hook of the target, so they cannot be filled: {listed(made)}."
        )
    expanded = [entry.name for entry in live.entries if _is_expanded(entry.tensor)]
    if expanded:
        raise UnsupportedError(
            f"expanded, so several elements are one in memory and cannot be filled: "
            f"{listed(expanded)}; clone them in the target."
        )
    for entry in live.entries:
        for _ in _places(live, entry):
            pass


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def materialize(module: nn.Module, filled: Collection[int]) -> list[str]:
    """Give the meta tensors that will be filled memory on the CPU; return the names of the others.

    Aliases stay aliases. What is in no checkpoint, such as a non-persistent buffer, stays on the
    meta device: memory without values would look as if it were loaded.

    Args:
        module: the target.
        filled: `id` of every tensor that will be filled.
    """
    made: dict[int, Tensor] = {}
    left = []
    for path, child in module.named_modules(remove_duplicate=False):
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in filled:
                    left.append(without_wrappers(f"{path}.{name}".lstrip(".")))
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _on_cpu(tensor)
                held[name] = made[id(tensor)]
    return left


def _on_cpu(tensor: Tensor) -> Tensor:
    values = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values


def settle(live: LiveModel) -> None:
    """Wait for gathers in flight, so that their results cannot overwrite what is filled."""
    in_flight = getattr(live.module, "ds_inflight_param_registry", None)
    if in_flight:
        for handle in list(in_flight.values()):
            handle.wait()
        in_flight.clear()


@torch.no_grad()
def fill(live: LiveModel, entry: Entry, read: Read) -> None:
    """Put a tensor's values into every place of this rank that holds them.

    Local. Memory: 1 MiB, or the tensor where it is not contiguous in the target.
    """
    if entry.role == "extra_state":
        _set_extra_state(live, entry, read)
    for values, start in _places(live, entry):
        step = max(1, CHUNK_BYTES // values.element_size())
        for offset in range(0, values.numel(), step):
            part = values[offset : offset + step]
            part.copy_(read(start + offset, start + offset + part.numel()))
    if not entry.is_partitioned and not entry.tensor.is_contiguous():
        entry.tensor.copy_(read(0, entry.tensor.numel()).view(entry.tensor.shape))
    if getattr(entry.tensor, "ds_secondary_tensor", None) is not None:
        entry.tensor.ds_secondary_tensor = None  # type: ignore[attr-defined]


def _places(live: LiveModel, entry: Entry) -> Iterator[tuple[Tensor, int]]:
    """Yield 1-D views of the memory that holds the tensor, and the element each begins with."""
    tensor: Any = entry.tensor
    if entry.is_partitioned:
        partition = partition_of(tensor, entry.name)
        yield partition.values, partition.start
        copy = gathered_copy(tensor)
        if copy is not None:
            yield copy.detach().view(-1), 0
    elif tensor.is_contiguous() and entry.is_registered and not tensor.is_meta:
        yield tensor.detach().view(-1), 0
    master = live.masters.get(id(tensor))
    if master is not None:
        yield master.values, master.start


def _set_extra_state(live: LiveModel, entry: Entry, read: Read) -> None:
    values = read(0, entry.tensor.numel()).view(entry.tensor.shape)
    modules = {
        without_wrappers(path): child
        for path, child in live.module.named_modules(remove_duplicate=False)
    }
    for name in entry.group.names:
        path = (live.removed_prefix + name).rpartition("_extra_state")[0].rstrip(".")
        modules[path].set_extra_state(values)
