"""A drop-in for `deepspeed.utils.zero_to_fp32`: its functions, their arguments, its command line.

Import from here instead; or let whoever imports the other find this one, DeepSpeed's engine too if
it stands before `import deepspeed`; or run it::

    sys.modules["deepspeed.utils.zero_to_fp32"] = zckpt.compat.zero_to_fp32

    python -m zckpt.compat.zero_to_fp32 runs/7b out/7b --safe_serialization

Where the other gives a right result, this gives the same one: the module's own names, masters in
fp32, frozen parameters as stored, floating buffers in fp32, tied tensors as one object. What is
different:

* DeepSpeed is not needed, nothing in a folder is run, and damaged files are errors;
* parameters that are nowhere in a folder are an error, where the other left them out in silence;
* parameters outside the optimizer, ties that the folder does not list, stage 0, `BF16_Optimizer`
  and folders of DeepSpeed 0.8 are read too; integer and boolean buffers always keep their dtype;
* `checkpoint_dir` may be the folder of a tag, and needs no `latest` where there is one tag only;
* tied tensors go into safetensors once, the other names into the metadata;
* files get their names when all of them are complete.

`zckpt.convert` has more to offer: a manifest, digests, `from_pretrained` on its result.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zckpt.digests import Block, blocks_of
from zckpt.errors import (
    MissingParametersError,
    NotACheckpointError,
    SpecMismatchError,
    TargetExistsError,
    UsageError,
    ZckptError,
)
from zckpt.names import listed, without_wrappers
from zckpt.plan import INDEX_NAME, plan_files
from zckpt.sources.consolidated import find
from zckpt.sources.zero import ZeroEntry, ZeroFolder
from zckpt.spec import DTYPES, AliasGroup, TensorSpec
from zckpt.tensors import torch_dtype
from zckpt.torchfile import Checksums
from zckpt.writers import commit, stream

logger = logging.getLogger("zckpt")

OUTPUT_DTYPE_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
"""What `dtype` may be, beside torch's own objects."""

debug = 0
"""Callers of DeepSpeed's module set it; nothing is printed here."""

PathLike = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)


class Lazy(Protocol):
    """A tensor that may not have been read yet; torch's own are of this kind too."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def contiguous(self) -> Tensor:
        """Return it in memory."""
        ...


class LazyTensor:
    """Stands for a tensor of the folder until `contiguous` reads it.

    The names of a tied tensor have one such object between them.
    """

    def __init__(self, folder: ZeroFolder, owner: str, spec: TensorSpec) -> None:
        """Read nothing yet. `spec` has the name and the dtype that are asked for."""
        self._folder = folder
        self._owner = owner
        self.spec = spec
        self.shape = torch.Size(spec.shape)
        self.dtype = torch_dtype(spec.dtype)

    def __repr__(self) -> str:
        return f"<lazy {self.spec.name}: {list(self.shape)} {self.spec.dtype.name}>"

    def contiguous(self) -> Tensor:
        """Return the tensor, read into new memory."""
        return self.read(0, self.spec.numel).view(self.shape)

    def read(self, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor, in new memory."""
        return self._folder.read(self._owner, start, end).to(self.dtype)


# ------------------------------------------------------------------ state dicts


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the state dict of a ZeRO folder, under the module's own names.

    **Memory:** all of it, or with `lazy_mode` nothing until `contiguous()` is called.

    Args:
        checkpoint_dir: the folder of a run, or of one tag in it.
        tag: which checkpoint of the run; without it the one that `latest` names, or the only one.
        exclude_frozen_parameters: leave out parameters that the optimizer does not hold.
        lazy_mode: return `LazyTensor`s. What they read is not compared with the CRC-32 in the
            files, which is of more than one tensor.

    Raises:
        NotACheckpointError: no such folder or tag.
        CorruptCheckpointError: a file is missing, damaged, or does not belong to the others.
        MissingParametersError: parameters that the module has are nowhere in the folder.
        UnsupportedError: experts, pipeline or tensor parallel.
    """
    checks = Checksums()
    folder = _open(
        checkpoint_dir,
        tag,
        None if lazy_mode else checks,
        may_lack_some=exclude_frozen_parameters,
        may_lack_frozen=exclude_frozen_parameters,
    )
    lazy = _lazy(folder, exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return lazy
    values = to_torch_tensor(lazy)
    _verify(checks)
    return values


def load_state_dict_from_zero_checkpoint(
    model: M, checkpoint_dir: PathLike, tag: str | None = None
) -> M:
    """Move a model to the CPU, load a ZeRO folder into it, and return it.

    A folder that was saved without its frozen parameters leaves the model's own as they are. Names
    that only one side has are logged.

    **Memory:** all tensors of the folder, beside the model.

    Raises:
        SpecMismatchError: the folder and the model have no name in common.
        Others as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    checks = Checksums()
    folder = _open(checkpoint_dir, tag, checks, may_lack_some=False, may_lack_frozen=True)
    values = to_torch_tensor(_lazy(folder, exclude_frozen=False))
    _verify(checks)
    model = model.cpu()
    if not values.keys() & model.state_dict().keys():
        raise SpecMismatchError(
            f"{folder.path} and the model have no name in common: the one has {listed(values, 3)}, "
            f"the other {listed(model.state_dict(), 3)}. Nothing was loaded."
        )
    missing, unexpected = model.load_state_dict(values, strict=False)
    if missing:
        logger.warning("%s has no values for %s", folder.path, listed(missing))
    if unexpected:
        logger.warning("the model has no place for %s", listed(unexpected))
    return model


def to_torch_tensor(
    state_dict: Mapping[str, Lazy],
    return_empty_tensor: bool = False,
    dtype: str | torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a lazy state dict; what was one object is one tensor.

    Args:
        state_dict: tensors, lazy or not.
        return_empty_tensor: return tensors of these shapes without their values.
        dtype: what floating tensors are cast to.
    """
    cast = None if dtype is None else _resolved(dtype)
    made: dict[int, Tensor] = {}
    for lazy in state_dict.values():
        target = cast if cast is not None and lazy.dtype.is_floating_point else lazy.dtype
        if id(lazy) not in made and return_empty_tensor:
            made[id(lazy)] = torch.empty(lazy.shape, dtype=target)
        elif id(lazy) not in made:
            made[id(lazy)] = lazy.contiguous().to(target)
    return {name: made[id(lazy)] for name, lazy in state_dict.items()}


# ------------------------------------------------------------------ files


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a ZeRO folder as files in fp32; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a ZeRO folder as `pytorch_model*.bin` or `model*.safetensors`, several with an index.

    Files get their names when all of them are complete; until then what is in `output_dir` stays.

    **Memory:** one file of `pytorch_model*.bin`; a few MiB a thread for safetensors.

    Args:
        checkpoint_dir: the folder of a run, or of one tag in it.
        output_dir: a folder, which may be there already.
        dtype: what all floating tensors are cast to; others keep theirs.
        max_shard_size: largest file, in bytes or like `"5GB"`; None for one file.
        safe_serialization: write safetensors.
        tag: which checkpoint of the run; without it the one that `latest` names, or the only one.
        exclude_frozen_parameters: leave out parameters that the optimizer does not hold.

    Raises:
        UsageError: a dtype or a size that makes no sense.
        TargetExistsError: `output_dir` is a file.
        NoSpaceError: the disk cannot hold the files.
        Others as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    target, checks = Path(output_dir), Checksums()
    if target.exists() and not target.is_dir():
        raise TargetExistsError(f"{target} is a file; name a folder.")
    folder = _open(
        checkpoint_dir,
        tag,
        checks,
        may_lack_some=exclude_frozen_parameters,
        may_lack_frozen=exclude_frozen_parameters,
    )
    state_dict = _lazy(folder, exclude_frozen=exclude_frozen_parameters, dtype=_resolved(dtype))
    size_bytes = sum(lazy.spec.size_bytes for lazy in set(state_dict.values()))
    commit.check_space(target.absolute() / "pytorch_model.bin", size_bytes)
    write = _write_safetensors if safe_serialization else _write_bin
    with _staged(target) as staging:
        write(state_dict, staging, sys.maxsize if max_shard_size is None else max_shard_size)
        _verify(checks)


def _write_safetensors(
    state_dict: Mapping[str, LazyTensor], folder: Path, max_shard_size: int | str
) -> None:
    names: dict[LazyTensor, list[str]] = {}
    for name, lazy in state_dict.items():
        names.setdefault(lazy, []).append(name)
    groups = [AliasGroup(owner, tuple(aliases)) for owner, *aliases in names.values()]
    plan = plan_files([lazy.spec for lazy in names], groups, max_shard_size=max_shard_size)
    stream.lay_out(folder, plan.files)
    if plan.index is not None:
        (folder / INDEX_NAME).write_bytes(plan.index)
    source = _ByName({lazy.spec.name: lazy for lazy in names})
    blocks = (block for lazy in names for block in blocks_of(lazy.spec))
    writer = stream.Writer(folder)

    def copy(block: Block) -> None:
        writer.write(plan.tensors[block.name], block, source, hashes=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(copy, blocks):
            pass


class _ByName:
    """The source that the writer asks for."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, start: int, end: int) -> Tensor:
        return self._tensors[name].read(start, end)


def _write_bin(
    state_dict: Mapping[str, LazyTensor], folder: Path, max_shard_size: int | str
) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        split = split_state_dict_into_shards_factory(
            dict(state_dict),
            get_storage_size=lambda lazy: lazy.spec.size_bytes,
            get_storage_id=id,
            filename_pattern="pytorch_model{suffix}.bin",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UsageError(f"max_shard_size={max_shard_size!r} is not a size: {error}") from None
    for file, names in split.filename_to_tensors.items():
        torch.save(to_torch_tensor({name: state_dict[name] for name in names}), folder / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "pytorch_model.bin.index.json").write_text(text, "utf-8")


_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield a folder whose files get their names in `target` when the block succeeds.

    Indices come last. After an error whatever `target` held is as it was.
    """
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".zckpt-staging-", dir=target) as staging:
            yield Path(staging)
            made = sorted(Path(staging).iterdir(), key=lambda path: (path.suffix == ".json", path))
            for path in made:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            for path in made:
                path.replace(target / path.name)
    except BaseException:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise
    others = {path.name for path in target.iterdir() if _WEIGHTS.fullmatch(path.name)}
    others -= {path.name for path in made}
    if others:
        logger.warning("%s also holds weights from before: %s", target, listed(sorted(others)))


# ------------------------------------------------------------------ the folder


def _open(
    checkpoint_dir: PathLike,
    tag: str | None,
    checks: Checksums | None,
    *,
    may_lack_some: bool,
    may_lack_frozen: bool,
) -> ZeroFolder:
    """Open a folder, or refuse it for what it lacks. Its notes are logged."""
    folder = ZeroFolder.open(find(checkpoint_dir), tag=tag, checks=checks)
    if folder.missing and not may_lack_some:
        raise MissingParametersError(
            f"{folder.path} lacks {len(folder.missing)} parameters of the module: "
            f"{listed(folder.missing)}. Neither the DeepSpeed optimizer held them nor were they "
            "saved as frozen. Save them from the live model with zckpt.save_consolidated; or leave "
            "out all that the optimizer does not hold: exclude_frozen_parameters"
        )
    if folder.lacks_frozen and not may_lack_frozen:
        raise MissingParametersError(
            f"{folder.path} was saved without its frozen parameters, which are not in it, not even "
            "by name. To go on without them: exclude_frozen_parameters"
        )
    for note in folder.notes:
        logger.warning("%s: %s", folder.path, note)
    return folder


def _lazy(
    folder: ZeroFolder, *, exclude_frozen: bool, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Return the folder's tensors by the module's names.

    Args:
        folder: where they are.
        exclude_frozen: leave out parameters that the optimizer does not hold.
        dtype: what floating tensors are cast to; without it floating buffers are cast to fp32.
    """
    state_dict: dict[str, LazyTensor] = {}
    for entry in _in_order(folder):
        if exclude_frozen and entry.spec.role == "parameter" and entry.value_from != "master":
            continue
        names = [folder.spelled[name] for name in entry.group.names]
        cast = torch.float32 if dtype is None and entry.spec.role == "buffer" else dtype
        spec = replace(entry.spec, name=names[0])
        if cast is not None and spec.dtype.is_floating and spec.role != "extra_state":
            spec = replace(spec, dtype=DTYPES[str(cast).removeprefix("torch.")])
        state_dict |= dict.fromkeys(names, LazyTensor(folder, entry.group.owner, spec))
    return state_dict


def _in_order(folder: ZeroFolder) -> list[ZeroEntry]:
    """Return the entries in DeepSpeed's order, which decides what goes into which file.

    Buffers, frozen parameters, trained ones as the optimizer has them, and what the folder lists
    nowhere.
    """
    shapes = (folder.files.frozen_shapes or {}, *folder.files.param_shapes)
    names = [without_wrappers(name) for group in shapes for name in group]
    position = {name: index for index, name in enumerate(names)}

    def place(entry: ZeroEntry) -> int:
        if entry.spec.role == "buffer":
            return -1
        spelled = (without_wrappers(folder.spelled[name]) for name in entry.group.names)
        return min(position.get(name, len(names)) for name in spelled)

    return sorted(folder.entries, key=place)


def _verify(checks: Checksums) -> None:
    """Compare all records that were read with their CRC-32, after reading the rest of them."""
    for part in list(checks.unread()):
        checks.read_rest(*part)
    checks.verify()


def _resolved(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype
    if isinstance(dtype, str):
        found = OUTPUT_DTYPE_NAMES.get(dtype.removeprefix("torch.").lower(), dtype)
    if not isinstance(found, torch.dtype) or found not in OUTPUT_DTYPE_NAMES.values():
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(OUTPUT_DTYPE_NAMES)}.")
    return found


# ------------------------------------------------------------------ finding files


def get_model_state_file(checkpoint_dir: PathLike, zero_stage: int) -> str:
    """Return the path of rank 0's model file in the folder of a tag, or raise FileNotFoundError."""
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    file = Path(checkpoint_dir) / f"{prefix}mp_rank_00_model_states.pt"
    if not file.is_file():
        raise NotACheckpointError(f"{file}: no such file.")
    return str(file)


def get_model_state_files(checkpoint_dir: PathLike) -> list[str]:
    """Return the model files in the folder of a tag by rank, or raise FileNotFoundError."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_optim_files(checkpoint_dir: PathLike) -> list[str]:
    """Return the optimizer files in the folder of a tag by rank, or raise FileNotFoundError."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_checkpoint_files(checkpoint_dir: PathLike, glob_pattern: str) -> list[str]:
    """Return the files that match, in the order of the numbers in their names."""
    found = Path(checkpoint_dir).glob(glob_pattern)
    files = sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    if not files:
        raise NotACheckpointError(f"{checkpoint_dir} holds no {glob_pattern}.")
    return [str(path) for path in files]


# ------------------------------------------------------------------ the command line


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` stand in for `sys.argv[1:]`."""
    parser = argparse.ArgumentParser(
        prog="python -m zckpt.compat.zero_to_fp32",
        description="Write a ZeRO folder as fp32 weights. 'zckpt convert' has more options.",
    )
    parser.add_argument("checkpoint_dir", help="folder of a run, or of one tag in it")
    parser.add_argument("output_dir", help="folder to write into")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument(
        "--safe_serialization",
        action="store_true",
        help="write model.safetensors instead of pytorch_model.bin",
    )
    parser.add_argument("-t", "--tag", help="which checkpoint; else the one 'latest' names")
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out what the optimizer does not hold",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error arose")
    args = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (ZckptError, OSError) as error:
        if args.debug:
            raise
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
