"""The files of one ZeRO checkpoint: which they are, what they say, whether they belong together.

Nothing in a file says which save it is of. What can be compared is: the name under which torch
wrote a file, partition counts, versions, configurations, steps, learning rates, shapes and sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zckpt import torchfile
from zckpt.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    UnsupportedError,
)
from zckpt.names import listed, shown
from zckpt.tensors import torch_dtype
from zckpt.torchfile import Checksums, Placeholder, TensorRef, TorchFile

LATEST_NAME = "latest"
"""The file in which DeepSpeed keeps the newest tag."""

Shape = tuple[int, ...]

_OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(
    r"((layer_\d+_)?expert_\d+|expp_rank_\d+)_mp_rank_\d+_(model|optim)_states\.pt"
)
_LAYER = re.compile(r"layer_\d+-.*model_states\.pt")
"""The names that DeepSpeed gives: runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`,
`_get_expert_ckpt_name`), runtime/pipe/module.py (`ckpt_layer_path`)."""


# ------------------------------------------------------------------ finding


@dataclass(frozen=True, slots=True)
class Tag:
    """The folder of one checkpoint among those of a run."""

    folder: Path
    name: str
    notes: tuple[str, ...] = ()


def looks_like_zero(folder: Path) -> bool:
    """Whether a folder is that of a ZeRO run or of one of its tags."""
    return (folder / LATEST_NAME).is_file() or _has_states(folder) or bool(_tags(folder))


def find_tag(place: Path, tag: str | None) -> Tag:
    """Return the tag folder that is meant: `tag`, else `place` itself, else `latest`, else the one.

    Raises:
        NotACheckpointError: there is none, or several and nothing says which.
    """
    if tag is not None:
        return Tag(_named(place, tag, f"tag={tag!r}"), tag)
    latest = place / LATEST_NAME
    if _has_states(place) and (latest.is_file() or _tags(place)):
        raise CorruptCheckpointError(
            f"{place} holds *_states.pt and tags beside them, and nothing says which is meant. "
            "Move the files away, or name a tag: --tag"
        )
    if _has_states(place):
        return Tag(place, place.name)
    if latest.is_file():
        text = latest.read_text("utf-8", errors="replace").strip()
        return Tag(_named(place, text, f"{latest} says {text[:100]!r}"), text)
    tags = _tags(place)
    if len(tags) == 1:
        note = f"no file {LATEST_NAME!r}; took {tags[0].name}, the only tag"
        return Tag(tags[0], tags[0].name, (note,))
    if not tags:
        raise NotACheckpointError(
            f"{place} holds no *_model_states.pt and no folder with such files, so it is no ZeRO "
            "folder."
        )
    raise NotACheckpointError(
        f"{place} holds {len(tags)} tags and no file {LATEST_NAME!r} that names one: "
        f"{', '.join(_with_step(folder) for folder in tags)}. Name the one you want: --tag "
        f"{tags[-1].name}"
    )


def _named(place: Path, tag: str, said: str) -> Path:
    parts = Path(tag).parts
    if not parts:
        raise NotACheckpointError(f"{said}, which names nothing.")
    if Path(tag).is_absolute() or ".." in parts or "\0" in tag:
        raise NotACheckpointError(f"{said}, which is outside {place}; it was not followed.")
    folder = place / tag
    if _has_states(folder):
        return folder
    what = "a folder without *_states.pt" if _is_folder(folder) else "no folder"
    tags = _tags(place)
    there = (
        f"These are there: {listed(t.name for t in tags)}." if tags else "No other tag is there."
    )
    raise NotACheckpointError(f"{said}, but {shown(folder)} is {what}. {there}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _has_states(folder: Path) -> bool:
    if not _is_folder(folder):
        return False
    return any(folder.glob("*model_states.pt")) or any(folder.glob("*optim_states.pt"))


def _tags(place: Path) -> list[Path]:
    """Return the tag folders in a folder, in the order of the numbers in their names."""
    try:
        found = [path for path in place.iterdir() if _has_states(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _with_step(folder: Path) -> str:
    for path in sorted(folder.glob("*model_states.pt")):
        if _MODEL.fullmatch(path.name):
            try:
                step = torchfile.load(path).tree["global_steps"]
            except (CorruptCheckpointError, KeyError, TypeError):
                break
            return f"{folder.name} (step {step})"
    return folder.name


# ------------------------------------------------------------------ reading


@dataclass(frozen=True, eq=False)
class ZeroFiles:
    """The files of one tag, read as far as their pickles go, and found to belong together."""

    folder: Path
    stage: int
    ranks: int
    """Ranks over which weights are partitioned: the number of files of each kind in stage 3."""
    world_size: int
    """Ranks that trained; more than `ranks` with MiCS."""
    models: tuple[TorchFile, ...]
    """By rank in stage 3, else one."""
    optimizers: tuple[TorchFile, ...]
    """By rank; none in stage 0."""
    groups: tuple[tuple[TensorRef, ...], ...]
    """The flat fp32 groups, by rank and group."""
    notes: tuple[str, ...]
    other_step: str | None = None
    """What to say about optimizer files that seem to be of another step than the model files."""

    @property
    def model(self) -> Mapping[str, Any]:
        """What rank 0's model file says."""
        return self.models[0].tree  # type: ignore[no-any-return]

    @property
    def module(self) -> Mapping[str, Any]:
        """The module's state dict, in stage 3 with placeholders of no elements."""
        return mapping(self.models[0], "module")

    @property
    def param_shapes(self) -> tuple[Mapping[str, Shape], ...]:
        """Names and shapes of what the optimizer holds, in its order, by (sub-)group."""
        found = self.model.get("param_shapes")
        if not isinstance(found, (list, tuple, type(None))):
            raise CorruptCheckpointError(
                f"{self.models[0].path} has {_what(found)} where lists of shapes are expected."
            )
        return tuple(_shapes(self.models[0], shapes) for shapes in found or ())

    @property
    def frozen_shapes(self) -> Mapping[str, Shape] | None:
        """Names and full shapes of frozen parameters; None where the file does not say."""
        found = self.model.get("frozen_param_shapes")
        return None if found is None else _shapes(self.models[0], found)

    def config(self, *keys: str) -> Any:
        """Return what DeepSpeed's configuration has under nested keys, or None."""
        found: Any = self.model.get("ds_config")
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    @property
    def optimizer_state(self) -> Mapping[str, Any]:
        """What rank 0's optimizer file says beside its groups."""
        return optimizer_state(self.optimizers[0])


def read_files(folder: Path, allowed: frozenset[str] = frozenset()) -> ZeroFiles:
    """Find and read the files of a tag folder, and check that they belong together.

    Raises:
        CorruptCheckpointError: a file is missing, damaged or not of this checkpoint.
        UnsafePickleError: a pickle would run code.
        UnsupportedError: experts, pipeline or tensor parallel: what zckpt does not put together.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    known: torchfile.Known = {}
    _refuse_parallel(folder, names)
    optimizer_names = _by_rank(folder, names, _OPTIMIZER, 2)
    model_names = _by_rank(folder, names, _MODEL, 1)
    notes = [
        f"ignored {name}: DeepSpeed gives no such name"
        for name in names
        if name.endswith("_states.pt") and not any(p.fullmatch(name) for p in (_OPTIMIZER, _MODEL))
    ]
    if not model_names:
        raise CorruptCheckpointError(
            f"{folder} holds no *_model_states.pt, which have the names and shapes; the optimizer "
            "files alone are no checkpoint."
        )
    if None in model_names and len(model_names) > 1:
        one, other = list(model_names.values())[:2]
        raise CorruptCheckpointError(
            f"{folder} holds {one} and {other}: model files of a run of stage 3 and of one of "
            "another stage. Move those of the one away."
        )
    is_stage_3 = None not in model_names
    first = 0 if is_stage_3 else None
    model_0 = _load(folder, model_names, first, allowed, known)
    if not optimizer_names:
        _refuse_lost_optimizer(folder, model_0)
        return ZeroFiles(folder, 0, 1, _world(model_0), (model_0,), (), (), tuple(notes))
    optimizer_0 = _load(folder, optimizer_names, 0, allowed, known)
    stage, ranks = _stage(optimizer_0), _partition_count(optimizer_0)
    if is_stage_3 != (stage == 3):
        raise CorruptCheckpointError(
            f"{optimizer_0.path} is of ZeRO stage {stage}, {model_0.path} of "
            f"{'stage 3' if is_stage_3 else 'another'}."
        )
    rest = range(1, ranks)
    optimizers = (
        optimizer_0,
        *(_load(folder, optimizer_names, r, allowed, known, ranks) for r in rest),
    )
    models: tuple[TorchFile, ...] = (model_0,)
    if stage == 3:
        models += tuple(_load(folder, model_names, r, allowed, known, ranks) for r in rest)
    for kind in (optimizer_names, model_names):
        for rank, name in kind.items():
            if rank is not None and rank >= ranks:
                notes.append(f"ignored {name}: a leftover, this checkpoint is of {ranks} ranks")
    groups = tuple(_flat_groups(file, stage) for file in optimizers)
    files = ZeroFiles(
        folder,
        stage,
        ranks,
        _world(model_0),
        models,
        optimizers,
        groups,
        tuple(notes),
    )
    _check_together(files)
    return replace(files, other_step=_other_step(files))


def _load(
    folder: Path,
    names: Mapping[int | None, str],
    rank: int | None,
    allowed: frozenset[str],
    known: torchfile.Known,
    ranks: int | None = None,
) -> TorchFile:
    """Read the file of a rank; `ranks` is how many there are, where that is known."""
    if rank not in names:
        like = next(iter(names.values()))
        missing = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", like)
        of = "" if ranks is None else f" of {ranks}"
        raise CorruptCheckpointError(
            f"{folder / missing} is missing, the file of rank {rank}{of}; copy it from where that "
            "rank saved it."
        )
    file = torchfile.load(folder / names[rank], allowed, known)
    if not isinstance(file.tree, Mapping):
        raise CorruptCheckpointError(f"{file.path} holds no dict, so DeepSpeed did not write it.")
    is_named = file.saved_as is not None and any(
        pattern.fullmatch(f"{file.saved_as}.pt") for pattern in (_OPTIMIZER, _MODEL)
    )
    if is_named and file.saved_as != file.path.stem:
        raise CorruptCheckpointError(
            f"{file.path} was saved as {file.saved_as}.pt: it was renamed, or files were swapped."
        )
    return file


def _by_rank(
    folder: Path, names: Iterable[str], pattern: re.Pattern[str], rank_group: int
) -> dict[int | None, str]:
    """Return the names that match, by rank, in the order of ranks."""
    found: dict[int | None, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = None if match.group(rank_group) is None else int(match.group(rank_group))
        if int(match.groups()[-1]):
            raise UnsupportedError(
                f"{folder / name} is of tensor- or pipeline-parallel rank {match.groups()[-1]}: "
                "each such rank has a part of each weight, and how they join depends on the model. "
                "Load the checkpoint in DeepSpeed with the same ranks and call save_consolidated."
            )
        if rank in found:
            raise CorruptCheckpointError(
                f"{folder} holds {found[rank]} and {name}, two files of rank {rank} by runs of "
                "different precision. Move those of the one run away."
            )
        found[rank] = name
    return dict(sorted(found.items(), key=lambda item: -1 if item[0] is None else item[0]))


def _refuse_parallel(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        for pattern, what in (
            (_LAYER, "layers of a pipeline"),
            (_EXPERT, "mixture-of-experts layers"),
        ):
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{folder / name} holds {what}, of which zckpt does not know how they join."
                    " Load the checkpoint in DeepSpeed and call save_consolidated, or "
                    "use deepspeed.checkpoint.ds_to_universal."
                )


def _refuse_lost_optimizer(folder: Path, model: TorchFile) -> None:
    """Refuse a folder without optimizer files whose model file says that there were some."""
    if _MODEL.fullmatch(model.path.name).group(1) is not None or model.tree.get("param_shapes"):  # type: ignore[union-attr]
        raise CorruptCheckpointError(
            f"{folder} lacks its *_optim_states.pt, which hold the weights: {model.path.name} says "
            "that each rank saved one. Copy them from where they were saved."
        )


# ------------------------------------------------------------------ what files say


def mapping(file: TorchFile, key: str) -> Mapping[str, Any]:
    """Return the dict under a key of a file's tree, or raise a `CorruptCheckpointError`."""
    found = file.tree.get(key)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CorruptCheckpointError(
            f"{file.path} has {_what(found)} as {key!r} where DeepSpeed saves a dict."
        )
    return found


def _what(found: Any) -> str:
    if _is_number(found):
        return str(found)
    return f"a {found.name}" if isinstance(found, Placeholder) else f"a {type(found).__name__}"


def _shapes(file: TorchFile, shapes: Any) -> Mapping[str, Shape]:
    """Return names and shapes, after making sure that they are some."""
    ok = isinstance(shapes, Mapping) and all(
        isinstance(name, str)
        and isinstance(shape, (tuple, list))
        and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
        for name, shape in shapes.items()
    )
    if not ok:
        raise CorruptCheckpointError(f"{file.path} has {_what(shapes)} where shapes are expected.")
    return {name: tuple(shape) for name, shape in shapes.items()}


def optimizer_state(file: TorchFile) -> Mapping[str, Any]:
    """Return what an optimizer file says about the weights."""
    return mapping(file, "optimizer_state_dict")


def _stage(file: TorchFile) -> int:
    state = optimizer_state(file)
    stage = state.get("zero_stage")
    if stage is None and "fp32_flat_groups" not in state:
        stage = 1  # BF16_Optimizer, and stages 1 and 2 before DeepSpeed 0.3
    if type(stage) is not int or stage not in {1, 2, 3}:
        raise CorruptCheckpointError(
            f"{file.path} says {_what(stage)} as its ZeRO stage; expected 1, 2 or 3."
        )
    return stage


def _partition_count(file: TorchFile) -> int:
    count = optimizer_state(file).get("partition_count")
    counts = count if isinstance(count, list) else [count]
    numbers = [c for c in counts if type(c) is int and 0 < c < 1 << 20]
    if not numbers or len(numbers) != len(counts):
        raise CorruptCheckpointError(f"{file.path} has {_what(count)} as its partition count.")
    if len(set(numbers)) > 1:
        raise UnsupportedError(
            f"{file.path} has groups over {', '.join(map(str, counts))} ranks: expert parameters, "
            "of which zckpt does not know how they join. Load the checkpoint in DeepSpeed and call "
            "save_consolidated."
        )
    return numbers[0]


def _world(file: TorchFile) -> int:
    for key in ("mp_world_size", "tp_degree"):
        degree = file.tree.get(key, 1)
        if degree is not None and degree != 1:
            raise UnsupportedError(
                f"{file.path} is of a run with {key}={shown(degree)}: each such rank "
                "has a part of each weight. Load the checkpoint in DeepSpeed and call "
                "save_consolidated."
            )
    if file.tree.get("ds_autoep_layers"):
        raise UnsupportedError(
            f"{file.path} has expert-parallel layers; use deepspeed.checkpoint.ds_to_universal."
        )
    size = file.tree.get("dp_world_size", 1)
    return size if type(size) is int else 1


def _flat_groups(file: TorchFile, stage: int) -> tuple[TensorRef, ...]:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = optimizer_state(file).get(key)
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, TensorRef) for g in groups):
        raise CorruptCheckpointError(f"{file.path} has {_what(groups)} as {key!r}, not tensors.")
    for group in groups:
        file.check(group)
        if not group.is_contiguous or not group.dtype.is_floating:
            raise CorruptCheckpointError(
                f"{file.path}: {key} has a tensor of {group.dtype.name} {list(group.shape)}, not a "
                "flat one of floating numbers."
            )
    return tuple(groups)


# ------------------------------------------------------------------ belonging together


def _check_together(files: ZeroFiles) -> None:
    """Raise a `CorruptCheckpointError` that names the first file that is not like rank 0's."""
    _compare(
        files.optimizers, "partition_count", lambda f: optimizer_state(f).get("partition_count")
    )
    _compare(files.optimizers, "list of flat groups' sizes", _group_sizes(files))
    everything = (*files.models, *files.optimizers)
    _compare(everything, "DeepSpeed version", lambda f: f.tree.get("ds_version"))
    _compare(everything, "configuration", _config)
    _compare(files.optimizers, "optimizer's step", _steps)
    _compare(files.optimizers, "learning rates", _rates)
    _compare(files.optimizers, "loss scale", _scale)
    for key in ("global_steps", "dp_world_size", "param_shapes", "frozen_param_shapes"):
        _compare(files.models, key, partial(_under, key=key))
    _compare(files.models, "list of names", lambda f: list(mapping(f, "module")))
    mics = files.config("zero_optimization", "mics_shard_size")
    is_mics = type(mics) is int and mics > 0
    if files.world_size != files.ranks and not (is_mics and files.world_size % files.ranks == 0):
        raise CorruptCheckpointError(
            f"{files.models[0].path} is of a run on {files.world_size} ranks, "
            f"{files.optimizers[0].path} of one on {files.ranks}."
        )


def _compare(files: Sequence[TorchFile], what: str, of: Callable[[TorchFile], Any]) -> None:
    expected = of(files[0]) if files else None
    for file in files[1:]:
        found = of(file)
        if found != expected:
            raise CorruptCheckpointError(
                f"{file.path} does not belong to {files[0].path.name}: its {what} "
                f"{_differ(found, expected)}."
            )


def _under(file: TorchFile, key: str) -> Any:
    return file.tree.get(key)


def _differ(found: Any, expected: Any) -> str:
    """Return what differs, as far as it fits into a line."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        found = {key: found.get(key) for key in keys}
        expected = {key: expected.get(key) for key in keys}
    texts = [shown(repr(value)) for value in (found, expected)]
    if max(map(len, texts)) > 200:
        return "differs"
    return f"is {texts[0]}, expected {texts[1]}"


def _group_sizes(files: ZeroFiles) -> Any:
    by_file = dict(zip(files.optimizers, files.groups, strict=True))
    if files.stage == 3:
        return lambda file: [group.numel for group in by_file[file]]
    return lambda file: len(by_file[file])  # the last partition may be shorter


_MOST_SETTINGS = 100_000


def _config(file: TorchFile) -> Any:
    """Return DeepSpeed's configuration as it can be compared."""
    config = file.tree.get("ds_config")
    if torchfile.weigh(config) > _MOST_SETTINGS:
        raise CorruptCheckpointError(f"{file.path} has a configuration of too many settings.")
    return _plain(config)


def _plain(value: Any) -> Any:
    """Return a configuration with placeholders as their names, so that it can be compared."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value.name if isinstance(value, Placeholder) else value


def _steps(file: TorchFile) -> list[str] | None:
    """Return the steps that an optimizer file's state says, or None where it says none."""
    states = _inner_state(file).get("state")
    steps = set()
    for entry in states.values() if isinstance(states, Mapping) else ():
        step = entry.get("step") if isinstance(entry, Mapping) else None
        value = read_number(file, step) if isinstance(step, TensorRef) else step
        if isinstance(value, (int, float)):
            steps.add(str(int(value) if math.isfinite(value) else value))
    return sorted(steps) or None


def _rates(file: TorchFile) -> list[list[Any]] | None:
    """Return learning rates, and steps where they are kept beside them, or None."""
    groups = _inner_state(file).get("param_groups")
    rates = [
        [value for value in (group.get("lr"), group.get("step")) if _is_number(value)]
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping)
    ]
    return rates or None


def _scale(file: TorchFile) -> dict[str, float] | None:
    """Return the numbers of the loss scaler, or None."""
    scaler = optimizer_state(file).get("loss_scaler")
    said = scaler.state if isinstance(scaler, Placeholder) else None
    numbers = said.items() if isinstance(said, Mapping) else ()
    return {key: value for key, value in numbers if _is_number(value)} or None


def _inner_state(file: TorchFile) -> Mapping[str, Any]:
    """Return what the optimizer inside DeepSpeed's kept; empty where it was removed."""
    state = optimizer_state(file)
    inner = state.get("optimizer_state_dict") or state.get("base_optimizer_state")
    return inner if isinstance(inner, Mapping) else {}


def _other_step(files: ZeroFiles) -> str | None:
    """Return a note where optimizer and model file do not say the same number of steps."""
    made, skipped = files.model.get("global_steps"), files.model.get("skipped_steps", 0)
    steps = _steps(files.optimizers[0])
    if steps is None or len(steps) != 1 or type(made) is not int or type(skipped) is not int:
        return None
    # Before 0.14 DeepSpeed made the moments by a step of its own, which counts.
    version = re.match(r"(\d+)\.(\d+)", str(files.model.get("ds_version")))
    is_old = version is not None and tuple(map(int, version.groups())) < (0, 14)
    if int(steps[0] if steps[0].isdecimal() else -1) - (made - skipped) in {0, int(is_old)}:
        return None
    return (
        f"the optimizer says that it made {steps[0]} steps, the model file {made - skipped}: "
        "their files are of two saves, or the optimizer began anew during the run"
    )


def _is_number(value: Any) -> bool:
    return type(value) in {int, float}


def read_number(file: TorchFile, ref: TensorRef) -> float | int | None:
    """Return the value of a tensor of one element, checked; None for any other tensor."""
    file.check(ref)
    if ref.numel != 1 or ref.storage.size_bytes > 1 << 16:
        return None
    data = bytearray(ref.storage.size_bytes)
    file.read_into(memoryview(data), ref.storage, 0)
    checks = Checksums()
    checks.note(file, ref.storage, 0, memoryview(data))
    checks.verify()
    values = torch.frombuffer(data, dtype=torch_dtype(ref.dtype))
    number: float | int = values[ref.offset].item()
    return number
