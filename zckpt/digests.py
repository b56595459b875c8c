"""Digests: of files, of headers, and of tensors by blocks.

A tensor's digest is made from the digests of its 16 MiB blocks, so that several ranks or threads
can hash one tensor, whichever part each of them has. Everything that hashes for the manifest calls
this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from zckpt.manifest import Digest
from zckpt.spec import TensorSpec

BLOCK_BYTES = 16 << 20
"""Part of the format: the algorithm is named after it. Small enough to share one tensor among
ranks, large enough that the list of block digests is nothing (32 bytes for 16 MiB)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor that is read, written and hashed by one rank or thread."""

    name: str
    index: int
    """Position among the tensor's blocks."""
    start: int
    """First element of the flattened tensor, inclusive."""
    end: int
    """Element after the last, exclusive."""
    size_bytes: int


def blocks_of(spec: TensorSpec) -> Iterator[Block]:
    """Yield a tensor's blocks in order: all of 16 MiB but the last; none for an empty tensor."""
    step = BLOCK_BYTES // spec.dtype.size_bytes
    for index, start in enumerate(range(0, spec.numel, step)):
        end = min(start + step, spec.numel)
        yield Block(spec.name, index, start, end, (end - start) * spec.dtype.size_bytes)


def of_block(parts: Iterable[memoryview]) -> bytes:
    """Return the BLAKE3 digest of one block, given in parts."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def of_tensor(block_digests: Sequence[bytes]) -> Digest:
    """Return a tensor's digest: BLAKE3 of its blocks' digests, one behind the other."""
    return Digest(algorithm="blake3-16MiB", hex=blake3(b"".join(block_digests)).hexdigest())


def of_file(data: bytes) -> Digest:
    """Return the digest of a small file's content."""
    return Digest(algorithm="blake3", hex=blake3(data).hexdigest())


def of_header(header: bytes) -> Digest:
    """Return the digest that stands for a safetensors file, beside those of its tensors."""
    return Digest(algorithm="blake3-header", hex=blake3(header).hexdigest())
