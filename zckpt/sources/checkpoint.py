"""What every opened checkpoint is: a lazy mapping from names to tensors, read by ranges."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from zckpt import digests
from zckpt.digests import Block
from zckpt.manifest import Digest, Manifest
from zckpt.spec import TensorSpec
from zckpt.tensors import as_bytes, chunks


class Checkpoint(Mapping[str, Tensor]):
    """A lazy mapping from every name, aliases included, to its tensor.

    `checkpoint[name]` reads the tensor into new memory; `checkpoint.get_slice(name)[10:20]` reads
    the part that is asked for. Safe to use from several threads.
    """

    path: Path
    kind: str
    """What it is, in words."""
    specs: Mapping[str, TensorSpec]
    """The stored tensors by owner name, in the checkpoint's order."""
    aliases: Mapping[str, str]
    """The owner of each alias."""
    manifest: Manifest | None
    file_sizes_bytes: Mapping[str, int]
    """The files it is read from, by name."""
    facts: Mapping[str, str] = MappingProxyType({})
    """What it says about the run that saved it, where there is no manifest."""
    notes: tuple[str, ...] = ()
    """What deserves a look, as sentences."""

    def __iter__(self) -> Iterator[str]:
        """Yield the stored names, then the aliases."""
        yield from self.specs
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.specs) + len(self.aliases)

    def __contains__(self, name: object) -> bool:
        return name in self.specs or name in self.aliases

    def __getitem__(self, name: str) -> Tensor:
        spec = self.spec(name)
        return self.read(name, 0, spec.numel).view(spec.shape)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.path}: {len(self.specs)} tensors, {len(self.aliases)} aliases>"

    def owner(self, name: str) -> str:
        """Return the name under which a tensor is stored. Raises KeyError for an unknown name."""
        owner = self.aliases.get(name, name)
        if owner not in self.specs:
            raise KeyError(name)
        return owner

    def spec(self, name: str) -> TensorSpec:
        """Return name (the owner's), shape, dtype and role of a tensor."""
        return self.specs[self.owner(name)]

    @abstractmethod
    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor, in new memory."""

    def get_slice(self, name: str) -> Any:
        """Return a lazy slice of a tensor: index it to read the rows that are asked for."""
        return RowSlice(self, name)

    def check_range(self, name: str, start: int, end: int) -> TensorSpec:
        """Return the spec of a tensor, or raise an IndexError for a range that it has not."""
        spec = self.spec(name)
        if not 0 <= start <= end <= spec.numel:
            raise IndexError(f"{name} has {spec.numel} elements, not [{start}, {end}).")
        return spec

    def digest(self, name: str) -> Digest:
        """Return the digest of a tensor's bytes as they are now. Memory: 1 MiB."""
        blocks = digests.blocks_of(self.spec(name))
        return digests.of_tensor([self.digest_block(block) for block in blocks])

    def digest_block(self, block: Block) -> bytes:
        """Return the digest of one block's bytes as they are now. Memory: 1 MiB."""
        size_bytes = self.spec(block.name).dtype.size_bytes
        return digests.of_block(
            as_bytes(self.read(block.name, start, end))
            for start, end in chunks(block.start, block.end, size_bytes)
        )


class RowSlice:
    """A tensor that is read when it is indexed: the rows that are asked for, then torch's rules."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        """Read nothing yet. Raises KeyError for an unknown name."""
        self._checkpoint = checkpoint
        self._name = checkpoint.owner(name)

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self._checkpoint.spec(self._name).shape)

    def get_dtype(self) -> str:
        """Return the tensor's dtype by safetensors' code."""
        return self._checkpoint.spec(self._name).dtype.code

    def __getitem__(self, index: Any) -> Tensor:
        spec = self._checkpoint.spec(self._name)
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not spec.shape or not isinstance(first, (int, slice)):
            return self._checkpoint[self._name][index]
        rows = range(spec.shape[0])[first]
        wanted = rows if isinstance(rows, range) else range(rows, rows + 1)
        low, high = (min(wanted), max(wanted) + 1) if wanted else (0, 0)
        row_numel = math.prod(spec.shape[1:])
        part = self._checkpoint.read(self._name, low * row_numel, high * row_numel)
        part = part.view(high - low, *spec.shape[1:])
        if wanted != range(low, high):
            part = part[[row - low for row in wanted]]
        remaining = (slice(None) if isinstance(rows, range) else 0, *rest)
        return part[remaining]
