"""Where in the files of a ZeRO checkpoint the values of each parameter lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zckpt.errors import CorruptCheckpointError
from zckpt.layout import InFragments, InPartitions, Placement, Whole, fragment_numel, starts_of
from zckpt.names import listed
from zckpt.sources.zero_files import Shape, ZeroFiles, mapping, optimizer_state
from zckpt.spec import DType
from zckpt.tensors import as_bytes, torch_dtype
from zckpt.torchfile import Checksums, Placeholder, TensorRef, TorchFile


class Part(NamedTuple):
    """A tensor in a file: one flat group of a rank, a fragment, or a whole tensor."""

    file: TorchFile
    ref: TensorRef


@dataclass(frozen=True)
class Placed:
    """Where the values of one tensor lie."""

    dtype: DType
    placement: Placement
    parts: Sequence[Sequence[Part]]
    """By rank and group, as the placement's pieces name them."""
    rounds_to: Part | None = None
    """The module's copy that every value has to round to, where only that shows the order."""

    def fill(self, into: memoryview, start: int, end: int, checks: Checksums | None) -> None:
        """Read elements `[start, end)` of the flattened tensor, noting them in `checks`."""
        position = 0
        for piece in self.placement.pieces(start, end):
            file, ref = self.parts[piece.rank][piece.group]
            part = into[position : position + piece.numel * self.dtype.size_bytes]
            first = (ref.offset + piece.start) * self.dtype.size_bytes
            file.read_into(part, ref.storage, first)
            if checks is not None:
                checks.note(file, ref.storage, first, part)
            position += len(part)


def place(files: ZeroFiles, shapes: Sequence[Mapping[str, Shape]]) -> dict[str, Placed]:
    """Return where each parameter that the optimizer holds lies (stages 1 to 3).

    Args:
        files: the files of the checkpoint.
        shapes: names and shapes by group, in the optimizer's order.

    Raises:
        CorruptCheckpointError: the flat groups are not as large as the shapes ask for, or a rank's
            file says that it holds something else.
    """
    parts = [
        [Part(file, ref) for ref in groups]
        for file, groups in zip(files.optimizers, files.groups, strict=True)
    ]
    if files.stage == 3:
        return dict(_place_fragments(files, shapes, parts))
    placed = dict(_place_partitions(files, shapes, parts))
    if not files.config("zero_optimization", "round_robin_gradients"):
        # With it DeepSpeed writes them down as if the parameters were in their first order.
        _check_slices(files, shapes, placed)
    return placed


def _place_fragments(
    files: ZeroFiles, shapes: Sequence[Mapping[str, Shape]], parts: Sequence[Sequence[Part]]
) -> Iterator[tuple[str, Placed]]:
    group_starts = starts_of([ref.numel for ref in files.groups[0]])
    members = [(name, math.prod(shape)) for group in shapes for name, shape in group.items()]
    asked = sum(fragment_numel(numel, files.ranks) for _, numel in members)
    if asked != group_starts[-1]:
        raise CorruptCheckpointError(
            f"{files.optimizers[0].path} has {group_starts[-1]} elements in its fp32 groups where "
            f"the shapes in {files.models[0].path.name} ask for {asked} on each of {files.ranks} "
            f"ranks.{_swapped_out(files)}"
        )
    dtype = _dtype(files, range(len(files.groups[0]))) if members else None
    offset = 0
    for name, numel in members:
        assert dtype is not None
        fragment = fragment_numel(numel, files.ranks)
        placement = InFragments(fragment, offset, group_starts) if numel else Whole()
        yield name, Placed(dtype, placement, parts)
        offset += fragment


def _place_partitions(
    files: ZeroFiles, shapes: Sequence[Mapping[str, Shape]], parts: Sequence[Sequence[Part]]
) -> Iterator[tuple[str, Placed]]:
    if len(shapes) != len(files.groups[0]):
        raise CorruptCheckpointError(
            f"{files.optimizers[0].path} has {len(files.groups[0])} fp32 groups where "
            f"{files.models[0].path.name} has the shapes of {len(shapes)}."
        )
    for group, members in enumerate(shapes):
        rank_starts = starts_of([groups[group].numel for groups in files.groups])
        dtype = _dtype(files, [group])
        offset = 0
        for (name, shape), padding in zip(
            members.items(), _alignments(files, group, len(members)), strict=True
        ):
            yield name, Placed(dtype, InPartitions(group, offset, rank_starts), parts)
            offset += math.prod(shape) + padding
        _check_rest(files, group, rank_starts[-1], offset)


def _alignments(files: ZeroFiles, group: int, members: int) -> Sequence[int]:
    """Return the elements that follow each parameter of a group so that the next is aligned."""
    said = files.optimizer_state.get("param_alignment_paddings")
    if said is None:
        return [0] * members
    paddings = said[group] if isinstance(said, list) and group < len(said) else None
    numbers = _counts(paddings)
    if numbers is None or len(numbers) != members:
        raise CorruptCheckpointError(
            f"{files.optimizers[0].path} has no list of the alignment paddings of the {members} "
            f"parameters of group {group}."
        )
    return numbers


def _counts(found: Any) -> list[int] | None:
    """Return a list of counts, or None for anything else."""
    is_one = isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in found)
    return found if is_one else None


def _check_rest(files: ZeroFiles, group: int, found: int, asked: int) -> None:
    """Make sure that what follows a group's parameters is the padding that was put there."""
    said = [_counts(optimizer_state(file).get("group_paddings")) for file in files.optimizers]
    paddings = [counts for counts in said if counts is not None and len(counts) > group]
    rest = found - asked
    if len(paddings) == len(said):
        fits = rest in {0, sum(padding[group] for padding in paddings)}
    else:
        fits = 0 <= rest < 2 * files.ranks  # what NCCL's alignment can add; stage_1_and_2.py
    if not fits:
        raise CorruptCheckpointError(
            f"{files.folder}: the ranks together have {found} elements in fp32 group {group} where "
            f"the shapes in {files.models[0].path.name} ask for {asked}.{_swapped_out(files)}"
        )


def _swapped_out(files: ZeroFiles) -> str:
    device = files.config("zero_optimization", "offload_optimizer", "device")
    if device != "nvme":
        return ""
    return (
        " The run kept its optimizer on NVMe, so they were never in the folder: load it in "
        "DeepSpeed and call save_consolidated."
    )


def _dtype(files: ZeroFiles, groups: Iterable[int]) -> DType:
    """Return the dtype of some groups' values, the same on every rank."""
    chosen = list(groups)
    dtypes = {ref[group].dtype for ref in files.groups for group in chosen}
    if len(dtypes) != 1:
        names = ", ".join(sorted(dtype.name for dtype in dtypes)) or "none"
        raise CorruptCheckpointError(f"{files.folder}: the fp32 groups have the dtypes {names}.")
    return dtypes.pop()


def _check_slices(
    files: ZeroFiles, shapes: Sequence[Mapping[str, Shape]], placed: Mapping[str, Placed]
) -> None:
    """Compare the layout with what each rank wrote down about its own partitions."""
    expected: list[list[dict[str, tuple[int, int]]]] = [
        [{} for _ in shapes] for _ in files.optimizers
    ]
    for group, members in enumerate(shapes):
        for name, shape in members.items():
            for piece in placed[name].placement.pieces(0, math.prod(shape)):
                expected[piece.rank][group][name] = (piece.start, piece.numel)
    for rank, file in enumerate(files.optimizers):
        slices = optimizer_state(file).get("param_slice_mappings")
        if not isinstance(slices, list) or len(slices) != len(shapes):
            continue
        for group, said in enumerate(slices):
            said = said if isinstance(said, Mapping) else {}  # noqa: PLW2901 -- not trusted
            found = [
                (address.state.get("start"), address.state.get("numel"))
                for address in said.values()
                if isinstance(address, Placeholder) and isinstance(address.state, Mapping)
            ]
            if found != list(expected[rank][group].values()):
                raise CorruptCheckpointError(
                    f"{file.path} does not hold what rank {rank} of {files.ranks} has of fp32 "
                    f"group {group}: it begins with {listed(said, 3)}, expected "
                    f"{listed(expected[rank][group], 3)}. It was renamed, or is of another run."
                )


# ------------------------------------------------------------------ without partitions


def has_unpartitioned_masters(files: ZeroFiles) -> bool:
    """Whether the model file of a stage 0 run holds fp32 masters."""
    optimizer = files.model.get("optimizer")
    kinds = ("fp32_groups", "fp32_groups_flat")
    return isinstance(optimizer, Mapping) and any(kind in optimizer for kind in kinds)


def place_unpartitioned(files: ZeroFiles, names: Sequence[str]) -> dict[str, Placed]:
    """Return where the fp32 masters of a stage 0 run lie in its model file; empty without masters.

    Nothing in the file says which master is whose. With one group they are in the module's order,
    as the parameters were handed to the optimizer; shapes have to agree, and each value that is
    read has to round to the module's. Where that does not hold, the module's values are what is
    left.

    Args:
        files: the files of the checkpoint.
        names: the module's parameters, each once, in order.
    """
    file = files.models[0]
    optimizer = file.tree.get("optimizer")
    groups = optimizer.get("fp32_groups") if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
        return {}
    module, masters = mapping(file, "module"), groups[0]
    if not all(isinstance(ref, TensorRef) and ref.is_contiguous for ref in masters):
        return {}
    if [ref.shape for ref in masters] != [module[name].shape for name in names]:
        return {}
    placed = {}
    for name, ref in zip(names, masters, strict=True):
        file.check(ref)
        placed[name] = Placed(ref.dtype, Whole(), [[Part(file, ref)]], Part(file, module[name]))
    return placed


# ------------------------------------------------------------------ does it round to the live one


_SAMPLE_NUMEL = 64


def check_samples(
    files: ZeroFiles, placed: Mapping[str, Placed], module: Mapping[str, TensorRef]
) -> str | None:
    """Compare a few masters of each rank's partitions with the 16-bit weights beside them.

    Stages 1 and 2 only: there the model file holds the module's weights, which are the masters,
    rounded. Returns a note where some are not.

    Raises:
        CorruptCheckpointError: the masters of some ranks do not round to them while those of the
            others do: their files are of another save.
    """
    if files.stage == 3:
        return None
    agreed: dict[int, list[bool]] = {}
    for rank, name, start, end in _samples(placed, module):
        values = torch.empty(end - start, dtype=torch_dtype(placed[name].dtype))
        placed[name].fill(as_bytes(values), start, end, None)
        agreed.setdefault(rank, []).append(
            rounds_to(values, Part(files.models[0], module[name]), start)
        )
    bad = [rank for rank, results in agreed.items() if not any(results)]
    if bad and len(bad) < len(agreed):
        raise CorruptCheckpointError(
            f"{files.optimizers[bad[0]].path} is of another save than {files.models[0].path.name}: "
            f"the masters of rank {bad[0]} do not round to the weights there, those of other ranks "
            "do."
        )
    if all(all(results) for results in agreed.values()):
        return None
    return (
        "the masters do not round to the module's 16-bit weights: something changed the one and "
        "not the other before the save, and masters are what training goes on with"
    )


def _samples(
    placed: Mapping[str, Placed], module: Mapping[str, TensorRef]
) -> Iterator[tuple[int, str, int, int]]:
    """Yield (rank, name, start, end) of a few elements in each rank's partitions."""
    taken: dict[int, int] = {}
    for name, place_ in placed.items():
        ref = module.get(name)
        if ref is None or not ref.is_contiguous or not ref.dtype.is_floating:
            continue  # the shapes were compared before
        start = 0
        for piece in place_.placement.pieces(0, ref.numel):
            if taken.get(piece.rank, 0) < 3:
                taken[piece.rank] = taken.get(piece.rank, 0) + 1
                yield piece.rank, name, start, start + min(piece.numel, _SAMPLE_NUMEL)
            start += piece.numel


def rounds_to(masters: Tensor, live: Part, start: int) -> bool:
    """Whether values are, rounded, those that a module's tensor has from element `start`."""
    dtype = torch_dtype(live.ref.dtype)
    held = torch.empty(masters.numel(), dtype=dtype, device="cpu")
    first = (live.ref.offset + start) * live.ref.dtype.size_bytes
    live.file.read_into(as_bytes(held), live.ref.storage, first)
    return torch.allclose(masters.to(dtype), held, rtol=0.0, atol=0.0, equal_nan=True)
