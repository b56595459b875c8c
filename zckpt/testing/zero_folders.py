"""Write the folders that DeepSpeed's `save_checkpoint` leaves, without training or DeepSpeed.

For readers of such folders: at any number of ranks, of any size, and with values that are known.
`write_zero_folder` puts given tensors into one; `write_large_folder` needs their shapes only and
holds no values at all, so that a model of 405 B parameters on 1,024 ranks takes half a minute.

Both cut whole tensors with torch's own operations and know nothing of how zckpt reads, so that
either can be tested against the other. What is where was read from DeepSpeed 0.19.8:

* `runtime/engine.py`: files and their keys (`_common_checkpoint_state`, `_save_zero_checkpoint`);
* `runtime/zero/stage3.py`: sub-groups, one flat partition a rank (`_create_fp16_sub_groups`,
  `_create_fp32_partitions`, `_rigid_state_dict`);
* `runtime/zero/stage_1_and_2.py`: order, alignment and padding of a flat group (`__init__`,
  `state_dict`);
* `runtime/bf16_optimizer.py` and `runtime/fp16/unfused_optimizer.py`: the same without paddings
  taken off, and without ZeRO.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zckpt.testing import torch_writer

Filling = Literal["zeros", "random"]
"""What large files hold: holes, which read as zeros and take no room, or noise."""

_Tree = dict[str, Any]
"""What is pickled as one file."""

_ADAMW: _Tree = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-08,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""The settings of torch's AdamW in a parameter group."""

_ROWS = 2
"""Samples in a micro batch."""


# ------------------------------------------------------------------ classes of DeepSpeed


@torch_writer.stands_for("deepspeed.runtime.zero.config", "ZeroStageEnum")
class _Stage:
    """The member of an enumeration, which is pickled as a call of its class."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __reduce__(self) -> tuple[type[_Stage], tuple[int]]:
        return _Stage, (self._value,)


class _Attributes:
    """An object that is pickled as its attributes."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


@torch_writer.stands_for("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
class _LossScaler(_Attributes):
    pass


@torch_writer.stands_for("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
class _DynamicLossScaler(_Attributes):
    pass


@torch_writer.stands_for("deepspeed.utils.tensor_fragment", "fragment_address")
class _FragmentAddress(_Attributes):
    pass


# ------------------------------------------------------------------ what is saved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A model and how it was trained; the fields are the arguments of `write_zero_folder`."""

    stage: int
    world_size: int
    groups: Sequence[Mapping[str, Tensor]]
    frozen: Mapping[str, Tensor]
    unowned: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    unlisted_aliases: Mapping[str, str]
    names: Sequence[str]
    live_dtype: torch.dtype
    sub_group_size: int | None = None
    alignment: int = 2
    aligns_parameters: bool = False
    round_robin: bool = False
    bf16_optimizer: bool = False
    moments: bool = True
    padding: float = 0.0
    global_steps: int = 3
    ds_version: str = "0.19.8"
    client_state: Mapping[str, object]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter under the name that is not an alias."""
        owned = {name: tensor for group in self.groups for name, tensor in group.items()}
        return owned | dict(self.frozen) | dict(self.unowned)

    @property
    def loss_scaler(self) -> _Attributes:
        """What DeepSpeed scales the loss with."""
        if self.live_dtype != torch.float16:
            return _LossScaler(cur_scale=1.0, dynamic=False)
        return _DynamicLossScaler(
            cur_scale=16,
            dynamic=True,
            cur_iter=self.global_steps,
            last_overflow_iter=-1,
            scale_factor=2.0,
            scale_window=1000,
            min_scale=1,
            delayed_shift=2,
            cur_hysteresis=2,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )

    @property
    def config(self) -> _Tree:
        """The configuration that DeepSpeed was given."""
        zero: _Tree = {"stage": self.stage}
        if self.sub_group_size is not None:
            zero["sub_group_size"] = self.sub_group_size
        if self.round_robin:
            zero["round_robin_gradients"] = True
        if self.aligns_parameters:
            zero["parameter_alignment"] = True
        config: _Tree = {
            "train_micro_batch_size_per_gpu": _ROWS,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        }
        if self.live_dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
        if self.live_dtype == torch.float16:
            config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        if self.bf16_optimizer:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config


def write_zero_folder(
    root: str | os.PathLike[str],
    *,
    stage: int,
    world_size: int,
    groups: Sequence[Mapping[str, Tensor]],
    tag: str = "global_step3",
    frozen: Mapping[str, Tensor] = {},
    unowned: Mapping[str, Tensor] = {},
    buffers: Mapping[str, Tensor] = {},
    aliases: Mapping[str, str] = {},
    unlisted_aliases: Mapping[str, str] = {},
    names: Sequence[str] | None = None,
    live_dtype: torch.dtype = torch.bfloat16,
    sub_group_size: int | None = None,
    alignment: int = 2,
    aligns_parameters: bool = False,
    round_robin: bool = False,
    bf16_optimizer: bool = False,
    moments: bool = True,
    padding: float = 0.0,
    global_steps: int = 3,
    ds_version: str = "0.19.8",
    client_state: Mapping[str, object] = {},
) -> Path:
    """Write a checkpoint that holds these tensors, and return the folder of its tag.

    Parameters without elements are saved with the frozen ones, wherever they are given.

    **Memory:** some copies of all tensors.

    Args:
        root: the folder to write into; `latest` in it will name the tag.
        stage: 0 to 3.
        world_size: number of ranks.
        groups: fp32 masters by name, one mapping for each parameter group of the optimizer, in the
            optimizer's order.
        tag: name of the folder in `root`.
        frozen: parameters that do not train.
        unowned: parameters that would train but are in no group. Stage 3 saves them nowhere.
        buffers: what `state_dict()` holds besides, saved as it is.
        aliases: further names of parameters, each with the name under which the tensor is given.
        unlisted_aliases: as `aliases`, but `shared_params` leaves them out and only the shared
            storage in `module` tells. So it is with modules that are registered twice.
        names: order of `state_dict()`, aliases too; as given, groups first, when None.
        live_dtype: dtype of the parameters outside the optimizer.
        sub_group_size: stage 3: elements of a rank's partition at which a sub-group is full; one
            sub-group for each group when None.
        alignment: stages 1 and 2: a flat group is padded to a multiple of this times `world_size`
            elements (DeepSpeed's `nccl_start_alignment_factor`).
        aligns_parameters: stages 1 and 2: every parameter begins at a multiple of 16 bytes of the
            live dtype (DeepSpeed's `zero_optimization.parameter_alignment`).
        round_robin: stages 1 and 2: parameters are dealt to the ranks in turn, which changes their
            order in the flat group (DeepSpeed's `round_robin_gradients`).
        bf16_optimizer: stage 1: what DeepSpeed's BF16_Optimizer writes.
        moments: whether the optimizer has made a step, and so has moments.
        padding: fills every element that belongs to no parameter; NaN shows who copies it.
            DeepSpeed leaves zeros there in stages 1 and 2, and what the memory held in stage 3.
        global_steps: how many steps were made.
        ds_version: the version to name. The keys are those of 0.19.8.
        client_state: what the caller of `save_checkpoint` added to the model's files.

    Raises:
        ValueError: there is no such stage.
    """
    owners = [*(name for group in groups for name in group), *frozen, *unowned]
    order = names or [*owners, *buffers, *aliases, *unlisted_aliases]
    trained, untrained = _by_training(groups, frozen, order)
    run = _Run(
        stage=stage,
        world_size=world_size,
        groups=trained,
        frozen=untrained,
        unowned=unowned,
        buffers=buffers,
        aliases=aliases,
        unlisted_aliases=unlisted_aliases,
        names=order,
        live_dtype=live_dtype,
        sub_group_size=sub_group_size,
        alignment=alignment,
        aligns_parameters=aligns_parameters,
        round_robin=round_robin,
        bf16_optimizer=bf16_optimizer,
        moments=moments,
        padding=padding,
        global_steps=global_steps,
        ds_version=ds_version,
        client_state=client_state,
    )

    def write(path: Path, tree: _Tree) -> None:
        torch.save(tree, path, pickle_module=torch_writer)

    return _write(Path(root), tag, run, write)


def write_large_folder(
    root: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]],
    *,
    world_size: int,
    stage: int = 3,
    tag: str = "global_step3",
    frozen: Mapping[str, Sequence[int]] = {},
    buffers: Mapping[str, Tensor] = {},
    aliases: Mapping[str, str] = {},
    names: Sequence[str] | None = None,
    live_dtype: torch.dtype = torch.bfloat16,
    sub_group_size: int | None = 1_000_000_000,
    fill: Filling = "zeros",
    moments: Filling | None = "zeros",
    seed: int = 0,
) -> Path:
    """Write a checkpoint of a model of these shapes, and return the folder of its tag.

    The values are nowhere but in the files, and with "zeros" not even there. The live weights of
    stages 0 to 2 are filled by themselves, so they are not the masters in another dtype.

    **Memory:** the pickle of one file, and 48 MiB of noise.

    Args:
        root: the folder to write into; `latest` in it will name the tag.
        shapes: shapes of the trained parameters, in the order of the optimizer's one group.
        world_size: number of ranks.
        stage: 0 to 3.
        tag: name of the folder in `root`.
        frozen: shapes of the parameters that do not train.
        buffers: as for `write_zero_folder`, or on the meta device, to be filled.
        aliases: as for `write_zero_folder`.
        names: as for `write_zero_folder`.
        live_dtype: dtype of the parameters outside the optimizer.
        sub_group_size: as for `write_zero_folder`; by default DeepSpeed's own default.
        fill: what masters and live weights are.
        moments: what Adam's moments are; None leaves them out, as before the first step.
        seed: chooses the noise. It is the same for the same arguments.

    Raises:
        ValueError: there is no such stage.
    """

    def tensors(of: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        return {name: torch.empty(tuple(shape), device="meta") for name, shape in of.items()}

    order = names or [*shapes, *frozen, *buffers, *aliases]
    trained, untrained = _by_training([tensors(shapes)], tensors(frozen), order)
    run = _Run(
        stage=stage,
        world_size=world_size,
        groups=trained,
        frozen=untrained,
        unowned={},
        buffers=buffers,
        aliases=aliases,
        unlisted_aliases={},
        names=order,
        live_dtype=live_dtype,
        sub_group_size=sub_group_size,
        moments=moments is not None,
        client_state={},
    )
    fills: dict[str, torch_writer.Fill] = {
        "zeros": torch_writer.zeros,
        "random": torch_writer.Noise(seed),
    }

    def write(path: Path, tree: _Tree) -> None:
        of_moments = set(_moments(tree))

        def fill_one(file: Any, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
            filling = moments if storage in of_moments and moments else fill
            return fills[filling](file, storage, dtype)

        torch_writer.write_torch_file(path, tree, fill_one)

    return _write(Path(root), tag, run, write)


def _by_training(
    groups: Sequence[Mapping[str, Tensor]], frozen: Mapping[str, Tensor], order: Sequence[str]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the groups without their empty parameters, and the frozen parameters with those.

    DeepSpeed leaves parameters without elements out of its groups, and groups without parameters.
    """
    trained = [{name: t for name, t in group.items() if t.numel()} for group in groups]
    empty = {name: t for group in groups for name, t in group.items() if not t.numel()}
    untrained = {**frozen, **empty}
    in_order = {name: untrained[name] for name in order if name in untrained}
    return [group for group in trained if group], in_order


def _write(root: Path, tag: str, run: _Run, write: Callable[[Path, _Tree], None]) -> Path:
    folder = root / tag
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in _files(run):
        write(folder / name, tree)
    (root / "latest").write_text(tag)
    return folder


def _files(run: _Run) -> Iterator[tuple[str, _Tree]]:
    """Yield the name and the tree of each file, one at a time."""
    if run.stage not in range(4):
        raise ValueError(f"there is no ZeRO stage {run.stage}")
    if run.stage == 3:
        return _stage_3_files(run)
    if run.stage == 0:
        return iter([("mp_rank_00_model_states.pt", _stage_0_model(run))])
    return _stage_1_2_files(run)


# ------------------------------------------------------------------ stage 3


def _stage_3_files(run: _Run) -> Iterator[tuple[str, _Tree]]:
    sub_groups = [sub for group in run.groups for sub in _sub_groups(group, run)]
    masters = [torch.cat([_by_rank(t, run) for t in sub.values()], dim=1) for sub in sub_groups]
    frozen = {name: _by_rank(t.to(run.live_dtype), run) for name, t in run.frozen.items()}
    placeholders = {name: torch.empty(0, dtype=run.live_dtype) for name in run.parameters}
    numbers = {name: str(number) for number, name in enumerate(placeholders)}
    for rank in range(run.world_size):
        yield (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            _model_states(
                run,
                placeholders,
                param_shapes=[_shapes(sub) for sub in sub_groups],
                frozen_param_shapes=_shapes(run.frozen),
                shared_params=dict(run.aliases) if rank == 0 else {},
                frozen_param_fragments=OrderedDict(
                    (name, rows[rank].clone()) for name, rows in frozen.items()
                ),
            ),
        )
        flat = [rows[rank].clone().requires_grad_() for rows in masters]
        for partition, sub in zip(flat, sub_groups, strict=True):
            names = list(sub)
            vars(partition)["ds_id"] = f"{numbers[names[0]]}_{numbers[names[-1]]}"
        states = {
            "zero_stage": _Stage(3),
            "loss_scaler": run.loss_scaler,
            "dynamic_loss_scale": run.live_dtype == torch.float16,
            "overflow": False,
            "partition_count": run.world_size,
            "optimizer_state_dict": _adamw(
                run, flat, [len(_sub_groups(group, run)) for group in run.groups]
            ),
            "fp32_flat_groups": flat,
        }
        yield _optimizer_file(run, rank, states)


def _sub_groups(group: Mapping[str, Tensor], run: _Run) -> list[dict[str, Tensor]]:
    """Return the group cut behind each parameter with which a part is full."""
    if run.sub_group_size is None:
        return [dict(group)]
    found: list[dict[str, Tensor]] = []
    numel = run.sub_group_size
    for name, tensor in group.items():
        if numel >= run.sub_group_size:
            found.append({})
            numel = 0
        found[-1][name] = tensor
        numel += math.ceil(tensor.numel() / run.world_size)
    return found


def _by_rank(tensor: Tensor, run: _Run) -> Tensor:
    """Return the tensor's partitions as rows: `[ranks, elements]`, the end of them padding."""
    numel = math.ceil(tensor.numel() / run.world_size)
    padding = tensor.new_full((numel * run.world_size - tensor.numel(),), run.padding)
    return torch.cat([tensor.flatten(), padding]).view(run.world_size, numel)


# ------------------------------------------------------------------ stages 1 and 2


@dataclass(frozen=True, slots=True)
class _FlatGroup:
    """The parameters of a group one behind the other."""

    parameters: dict[str, Tensor]
    """In the order in which they lie there."""
    starts: dict[str, int]
    """Element at which each begins, in the optimizer's order."""
    paddings: list[int]
    """Elements of padding behind each."""
    numel: int
    """Elements without the padding at the end."""
    values: Tensor
    """All elements, as many as the ranks can share evenly."""


def _flat_group(group: Mapping[str, Tensor], run: _Run) -> _FlatGroup:
    order = [*group]
    if run.round_robin:
        order = [name for rank in range(run.world_size) for name in order[rank :: run.world_size]]
    unit = 16 // run.live_dtype.itemsize if run.aligns_parameters else 1
    pieces: list[Tensor] = []
    starts, paddings, numel = {}, [], 0
    for name in order:
        starts[name] = numel
        numel += group[name].numel()
        paddings.append(0 if name == order[-1] else -numel % unit)
        numel += paddings[-1]
        pieces += [group[name].flatten(), group[name].new_full((paddings[-1],), run.padding)]
    at_end = -numel % (run.alignment * run.world_size)
    pieces.append(pieces[0].new_full((at_end,), run.padding))
    return _FlatGroup(
        parameters={name: group[name] for name in order},
        starts={name: starts[name] for name in group},
        paddings=paddings,
        numel=numel,
        values=torch.cat(pieces),
    )


def _stage_1_2_files(run: _Run) -> Iterator[tuple[str, _Tree]]:
    groups = [_flat_group(group, run) for group in run.groups]
    live: dict[str, Tensor] = {}
    for group in groups:
        values = group.values.to(run.live_dtype)
        for name, tensor in group.parameters.items():
            live[name] = values.narrow(0, group.starts[name], tensor.numel()).view(tensor.shape)
    others = {**run.frozen, **run.unowned}
    live |= {name: tensor.to(run.live_dtype) for name, tensor in others.items()}
    frozen = OrderedDict((name, live[name].detach()) for name in run.frozen)
    yield (
        "mp_rank_00_model_states.pt",
        _model_states(
            run,
            live,
            param_shapes=[_shapes(group.parameters) for group in groups],
            frozen_param_shapes=_shapes(run.frozen) if run.stage == 2 else None,
            shared_params=dict(run.aliases),
            frozen_param_fragments=frozen if run.stage == 2 else None,
        ),
    )
    states = _bf16_optimizer_states if run.bf16_optimizer else _stage_1_2_states
    for rank in range(run.world_size):
        yield _optimizer_file(run, rank, states(run, groups, rank))


def _stage_1_2_states(run: _Run, groups: list[_FlatGroup], rank: int) -> _Tree:
    """Return what a rank saves: moments with the padding at the end, masters without.

    Only as views, though: the storages of the masters hold the padding too.
    """
    partitions = [_partition(group, rank, run) for group in groups]
    paddings = [
        min(max((rank + 1) * len(partition) - group.numel, 0), len(partition))
        for group, partition in zip(groups, partitions, strict=True)
    ]
    lean = [
        partition[: len(partition) - padding].requires_grad_()
        for partition, padding in zip(partitions, paddings, strict=True)
    ]
    return {
        "loss_scaler": run.loss_scaler,
        "dynamic_loss_scale": run.live_dtype == torch.float16,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": _adamw(run, partitions, [1 for _ in groups]),
        "single_partition_of_fp32_groups": lean,
        "zero_stage": _Stage(run.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [group.paddings for group in groups],
        "partition_count": [run.world_size for _ in groups],
        "ds_version": run.ds_version,
        "param_slice_mappings": [_slices(group, rank, run) for group in groups],
    }


def _bf16_optimizer_states(run: _Run, groups: list[_FlatGroup], rank: int) -> _Tree:
    """Return what a rank saves: masters with padding, all of which the last rank answers for."""
    partitions = [_partition(group, rank, run).requires_grad_() for group in groups]
    is_last = rank == run.world_size - 1
    return {
        "clip_grad": 0.0,
        "base_optimizer_state": _adamw(run, partitions, [1 for _ in groups]),
        "single_partition_of_fp32_groups": partitions,
        "group_paddings": [len(group.values) - group.numel if is_last else 0 for group in groups],
        "partition_count": [run.world_size for _ in groups],
        "ds_version": run.ds_version,
        "param_slice_mappings": [_slices(group, rank, run) for group in groups],
    }


def _partition(group: _FlatGroup, rank: int, run: _Run) -> Tensor:
    return group.values.view(run.world_size, -1)[rank].clone()


def _slices(group: _FlatGroup, rank: int, run: _Run) -> OrderedDict[str, _FragmentAddress]:
    """Return where in the rank's partition DeepSpeed believes which parameters to be.

    With `round_robin` it is mistaken: it adds up the sizes in the optimizer's order. Only where it
    has padding between parameters does it look.
    """
    partition_numel = len(group.values) // run.world_size
    begin, end = rank * partition_numel, (rank + 1) * partition_numel
    found: OrderedDict[str, _FragmentAddress] = OrderedDict()
    summed = 0
    for name, true_start in group.starts.items():
        start = true_start if any(group.paddings) else summed
        summed += group.parameters[name].numel()
        first, last = max(start, begin), min(start + group.parameters[name].numel(), end)
        if first < last:
            found[name] = _FragmentAddress(numel=last - first, start=first - begin)
    return found


# ------------------------------------------------------------------ stage 0


def _stage_0_model(run: _Run) -> _Tree:
    groups = [list(group.values()) for group in run.groups]
    adamw = _adamw(run, [t for group in groups for t in group], [len(group) for group in groups])
    is_fp16 = run.live_dtype == torch.float16
    optimizer = adamw
    if run.live_dtype != torch.float32:
        optimizer = {
            "dynamic_loss_scale": is_fp16,
            "cur_scale": 16 if is_fp16 else 1.0,
            "cur_iter": run.global_steps,
            **({"last_overflow_iter": -1, "scale_factor": 2.0} if is_fp16 else {}),
            **({"scale_window": 1000} if is_fp16 else {}),
            "optimizer_state_dict": adamw,
            "fp32_groups": [[t.clone().requires_grad_() for t in group] for group in groups],
        }
    live = {name: t.to(run.live_dtype) for name, t in run.parameters.items()}
    return _model_states(run, live, optimizer=optimizer)


# ------------------------------------------------------------------ what the files share


def _model_states(
    run: _Run,
    live: Mapping[str, Tensor],
    *,
    optimizer: _Tree | None = None,
    param_shapes: list[OrderedDict[str, torch.Size]] | None = None,
    frozen_param_shapes: OrderedDict[str, torch.Size] | None = None,
    shared_params: dict[str, str] | None = None,
    frozen_param_fragments: OrderedDict[str, Tensor] | None = None,
) -> _Tree:
    """Return the tree of a model's file, in which aliases share the storage of their owner."""
    tensors = {**live, **run.buffers}
    owners = {**run.aliases, **run.unlisted_aliases}
    return {
        "module": OrderedDict((n, tensors[owners.get(n, n)].detach()) for n in run.names),
        "buffer_names": list(run.buffers),
        "optimizer": optimizer,
        "param_shapes": param_shapes,
        "frozen_param_shapes": frozen_param_shapes,
        "shared_params": shared_params,
        "frozen_param_fragments": frozen_param_fragments,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": run.global_steps,
        "global_samples": run.global_steps * run.world_size * _ROWS,
        "dp_world_size": run.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": run.config,
        "ds_version": run.ds_version,
        **run.client_state,
    }


def _optimizer_file(run: _Run, rank: int, states: _Tree) -> tuple[str, _Tree]:
    prefix = "bf16_" if run.live_dtype == torch.bfloat16 else ""
    return (
        f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        {
            "optimizer_state_dict": states,
            "ds_config": run.config,
            "ds_version": run.ds_version,
        },
    )


def _shapes(tensors: Mapping[str, Tensor]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, tensor.shape) for name, tensor in tensors.items())


def _adamw(run: _Run, masters: Sequence[Tensor], group_lengths: Sequence[int]) -> _Tree:
    """Return the state of AdamW over `masters`, so many of them in each parameter group.

    The moments follow from the masters, so that they are known, and are other numbers.
    """
    state = {
        number: {
            "step": torch.tensor(float(run.global_steps)),
            "exp_avg": master.detach() * 0.5,
            "exp_avg_sq": master.detach().square(),
        }
        for number, master in enumerate(masters)
    }
    numbers = iter(range(len(masters)))
    return {
        "state": state if run.moments else {},
        "param_groups": [
            {**_ADAMW, "params": [next(numbers) for _ in range(length)]} for length in group_lengths
        ],
    }


def _moments(tree: Mapping[str, Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of Adam's moments, wherever they are."""
    for key, value in tree.items():
        if key in {"exp_avg", "exp_avg_sq"}:
            yield value.untyped_storage()
        elif isinstance(value, dict):
            yield from _moments(value)
