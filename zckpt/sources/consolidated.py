"""Read a consolidated folder: one written by zckpt, or any folder of Hugging Face safetensors.

Nothing is loaded until it is asked for. Ranges are read with positioned reads into memory of their
own, from any thread; slices go through the safetensors library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zckpt.errors import CorruptCheckpointError, NotACheckpointError
from zckpt.manifest import MANIFEST_NAME, Digest, Manifest, TensorRecord, parse_manifest
from zckpt.plan import FILE_PATTERN, INDEX_NAME
from zckpt.sources.checkpoint import Checkpoint
from zckpt.sources.zero_files import looks_like_zero
from zckpt.spec import DTYPES_BY_CODE, Span, TensorSpec
from zckpt.tensors import as_bytes, torch_dtype

_MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses larger headers, so a larger length is garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    spec: TensorSpec
    path: Path
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One safetensors file, as its header says."""

    path: Path
    header: bytes
    """Length prefix, JSON and padding."""
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    """Alias to owner, from the metadata."""


class Consolidated(Checkpoint):
    """A folder of safetensors, or one such file; see `Checkpoint`."""

    def __init__(self, path: Path, files: Iterable[StoredFile], manifest: Manifest | None) -> None:
        """Take what `open` found."""
        self.path = path
        self.files = tuple(files)
        self.manifest = manifest
        self.stored: dict[str, StoredTensor] = {}
        aliases: dict[str, str] = {}
        for file in self.files:
            for name in self.stored.keys() & file.tensors.keys():
                raise CorruptCheckpointError(
                    f"{path}: {name} is in {self.stored[name].path.name} and in {file.path.name}."
                )
            self.stored |= file.tensors
            aliases |= file.aliases
        aliases |= {
            alias: group.owner
            for group in (manifest.aliases if manifest else ())
            for alias in group.aliases
        }
        self.aliases = aliases
        if manifest is not None:
            known = [record.name for record in manifest.tensors if record.name in self.stored]
            self.stored = {name: self.stored[name] for name in [*known, *self.stored]}
        lost = sorted(o for o in aliases.values() if o not in self.stored)
        if lost:
            raise CorruptCheckpointError(f"{path}: aliases of {lost[0]}, which is not stored.")
        self.specs = {name: self._spec(stored) for name, stored in self.stored.items()}
        self.file_sizes_bytes = {f.path.name: f.path.stat().st_size for f in self.files}
        if manifest is not None:
            self.kind = "zckpt checkpoint"
        else:
            self.kind = "safetensors file" if path.is_file() else "Hugging Face folder"

    def _spec(self, stored: StoredTensor) -> TensorSpec:
        """Return the spec of a tensor, with the role that the manifest knows."""
        record = self.records.get(stored.spec.name)
        return stored.spec if record is None else replace(stored.spec, role=record.role)

    def get_slice(self, name: str) -> Any:
        """Return safetensors' lazy slice of a tensor: index it to read a part."""
        owner = self.owner(name)
        with safe_open(self.stored[owner].path, framework="pt") as handle:
            return handle.get_slice(owner)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor, in new memory."""
        spec = self.check_range(name, start, end)
        tensor = self.stored[spec.name]
        values = torch.empty(end - start, dtype=torch_dtype(spec.dtype), device="cpu")
        with _opened(tensor.path) as descriptor:
            _read_exactly(
                descriptor,
                as_bytes(values),
                tensor.span.start + start * spec.dtype.size_bytes,
                f"{tensor.path}: {name}",
            )
        return values

    @cached_property
    def records(self) -> Mapping[str, TensorRecord]:
        """The manifest's record of each stored tensor; empty without a manifest."""
        return {r.name: r for r in self.manifest.tensors} if self.manifest else {}

    def check(self, name: str, digest: Digest | None = None) -> None:
        """Raise a `CorruptCheckpointError` unless the tensor's bytes are those of the manifest.

        Args:
            name: the tensor; without a manifest nothing is checked.
            digest: what `digest(name)` returns, if it is known already.
        """
        owner = self.owner(name)
        record = self.records.get(owner)
        if self.manifest is not None and record is None:
            raise CorruptCheckpointError(f"{self.path}: {owner} is not in the manifest.")
        if record is None or record.digest is None:
            return
        found = digest or self.digest(owner)
        if found != record.digest:
            raise CorruptCheckpointError(
                f"{self.stored[owner].path}: {owner} has {found.algorithm} digest {found.hex} "
                f"where the manifest says {record.digest.hex}; the file was changed or damaged "
                "after it was saved. Take another copy or checkpoint."
            )


def open(path: str | os.PathLike[str]) -> Consolidated:  # noqa: A001 -- zckpt.open is the name
    """Open a zckpt folder, a Hugging Face safetensors folder or one safetensors file, lazily.

    Reads the manifest, the index and the headers. Local; needs neither deepspeed nor transformers.

    Raises:
        NotACheckpointError: there is no such thing at the path.
        CorruptCheckpointError: headers, index, manifest and file sizes contradict each other.
    """
    place = find(path)
    if place.is_file():
        return Consolidated(place, [read_header(place)], None)
    manifest_path = place / MANIFEST_NAME
    manifest = None
    if manifest_path.exists():
        if not manifest_path.is_file():
            raise CorruptCheckpointError(f"{manifest_path} is not a file.")
        manifest = parse_manifest(manifest_path.read_bytes(), str(manifest_path))
    files = [read_header(place / name) for name in file_names(place, manifest)]
    checkpoint = Consolidated(place, files, manifest)
    if manifest is None and len(files) > 1:
        for name, file in read_index(place / INDEX_NAME).items():
            if name not in checkpoint.stored or checkpoint.stored[name].path.name != file:
                raise CorruptCheckpointError(
                    f"{place}: the index says {name} is in {file}; it is not."
                )
    return checkpoint


def find(path: str | os.PathLike[str]) -> Path:
    """Return the file or folder at a path, `~` expanded, or raise a `NotACheckpointError`."""
    try:
        place = Path(path).expanduser()
        if place.is_file() or place.is_dir():
            return place
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise NotACheckpointError(f"{path!r} is no path: {error}") from None
    raise NotACheckpointError(f"{place}: no such file or folder.{_moved_away(place)}")


def is_consolidated(place: Path) -> bool:
    """Whether a file or folder has what `open` looks for."""
    marks = (MANIFEST_NAME, INDEX_NAME, FILE_PATTERN.format(suffix=""))
    return place.is_file() or any((place / mark).exists() for mark in marks)


def file_names(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return the names of a folder's safetensors files: by manifest, else index, else the one file.

    Raises:
        NotACheckpointError: there is none.
        CorruptCheckpointError: the index cannot be read, or names files outside the folder.
    """
    if manifest is not None:
        names = sorted({record.file for record in manifest.tensors})
    elif (folder / FILE_PATTERN.format(suffix="")).is_file():  # before the index, as transformers
        names = [FILE_PATTERN.format(suffix="")]
    elif (folder / INDEX_NAME).is_file():
        names = sorted(set(read_index(folder / INDEX_NAME).values()))
    else:
        raise NotACheckpointError(f"{folder} holds no {_expected()}.{_guess(folder)}")
    for name in names:
        if Path(name).name != name or name in {".", ".."} or len(name) > 255:
            raise CorruptCheckpointError(f"{folder}: the file name {name!r} leaves the folder.")
        if not (folder / name).is_file():
            raise CorruptCheckpointError(
                f"{folder}: the {'manifest' if manifest else 'index'} names {name}, which is not "
                "there; the checkpoint was copied or downloaded in part."
            )
    return names


def read_index(path: Path) -> dict[str, str]:
    """Return the map from names to files of a Hugging Face index."""
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(
            isinstance(value, str) for value in weight_map.values()
        ):
            raise TypeError("weight_map is not a map from names to files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not a safetensors index: {error!r}") from None
    return weight_map


def read_header(path: Path) -> StoredFile:
    """Return what a safetensors file's header says, after checking it against the file's size.

    Format: https://github.com/huggingface/safetensors#format

    Raises:
        CorruptCheckpointError: the header is no such header, spans overlap, leave holes or do not
            fit their shapes, or the file is shorter or longer than they say.
    """
    size_bytes = path.stat().st_size
    with _opened(path) as descriptor:
        prefix = bytearray(min(8, size_bytes))
        _read_exactly(descriptor, memoryview(prefix), 0, str(path))
        length = int.from_bytes(prefix, "little")
        if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CorruptCheckpointError(
                f"{path} is not a safetensors file, or was cut short: {size_bytes} bytes cannot "
                f"hold a header of {length}."
            )
        text = bytearray(length)
        _read_exactly(descriptor, memoryview(text), 8, str(path))
    base = 8 + length
    try:
        entries = json.loads(text.decode("utf-8"))
        aliases = _aliases(entries.pop("__metadata__", {}), entries)
        tensors = {name: _stored(path, base, name, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} has an unreadable header: {error!r}") from None
    _check_coverage(path, base, size_bytes, tensors)
    return StoredFile(
        path=path,
        header=bytes(prefix) + bytes(text),
        tensors=tensors,
        aliases=aliases,
    )


def _aliases(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> dict[str, str]:
    """Return alias to owner, from metadata that may say other things too."""
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("__metadata__ is not a map from text to text")
    return {
        key: value
        for key, value in metadata.items()
        if key != "format" and value in entries and key not in entries
    }


def _stored(path: Path, base: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype = DTYPES_BY_CODE.get(entry["dtype"])
    if dtype is None:
        raise CorruptCheckpointError(f"{path}: {name} has the unknown dtype {entry['dtype']!r}.")
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    name.encode("utf-8")  # raises a ValueError for half a surrogate pair
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end)):
        raise ValueError(f"{name} has a shape or offset that is no 63-bit number")
    if end - start != math.prod(shape) * dtype.size_bytes:
        raise CorruptCheckpointError(
            f"{path}: {name} has {end - start} bytes; its shape {list(shape)} in {dtype.name} "
            f"takes {math.prod(shape) * dtype.size_bytes}."
        )
    spec = TensorSpec(name=name, shape=shape, dtype=dtype, role="parameter")
    return StoredTensor(spec=spec, path=path, span=Span(base + start, base + end))


def _check_coverage(
    path: Path, base: int, size_bytes: int, tensors: Mapping[str, StoredTensor]
) -> None:
    position = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.span.start, t.span.end)):
        if tensor.span.start != position:
            raise CorruptCheckpointError(
                f"{path}: {tensor.spec.name} begins at byte {tensor.span.start}, not at {position} "
                "where the tensor before it ends."
            )
        position = tensor.span.end
    if position != size_bytes:
        raise CorruptCheckpointError(
            f"{path} has {size_bytes} bytes where its header asks for {position}: it was "
            f"{'cut short' if size_bytes < position else 'appended to'}."
        )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_exactly(descriptor: int, into: memoryview, position: int, where: str) -> None:
    while into:
        count = os.preadv(descriptor, [into], position)
        if count == 0:
            raise CorruptCheckpointError(f"{where}: the file ends at byte {position}, cut short.")
        into = into[count:]
        position += count


def _expected() -> str:
    return f"{MANIFEST_NAME}, {INDEX_NAME} or {FILE_PATTERN.format(suffix='')}"


def _guess(folder: Path) -> str:
    """Return a hint about what a folder is instead."""
    if looks_like_zero(folder):
        return f" It is a DeepSpeed ZeRO folder; convert it first: zckpt convert {folder} OUT"
    if any(folder.glob("*.bin")):
        return " It holds pickled weights (*.bin); convert them to safetensors first."
    inner = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if inner:
        return f" Did you mean one of the checkpoints in it, such as {inner[-1]}?"
    return ""


def _moved_away(place: Path) -> str:
    """Return a hint when a save died between moving the old checkpoint away and the new one in."""
    waiting = sorted(place.parent.glob(f".{place.name}.zckpt-old-*"))
    if not waiting:
        return ""
    return f" A save that died left the old checkpoint at {waiting[-1]}; rename it to {place.name}."
