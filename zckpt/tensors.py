"""One tensor at a time: its storable dtype, its bytes, its digest, whether it is the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zckpt import digests
from zckpt.errors import UnsupportedError
from zckpt.manifest import Digest
from zckpt.spec import DTYPES, DType, TensorSpec

CHUNK_BYTES = 1 << 20
"""Bytes read, cast, hashed or written at a time. They stay in the processor's cache from one to the
next; and ranks that write into one file at 16 MiB a call wait for each other ten times as long."""


def dtype_of(tensor: Tensor, name: str) -> DType:
    """Return the storable dtype of a tensor, or raise an `UnsupportedError` that names it."""
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {word}, which a safetensors file cannot hold; convert it to one of "
            f"{', '.join(DTYPES)}."
        )
    return DTYPES[word]


def can_be_stored(tensor: Tensor) -> bool:
    """Whether a tensor has values that a safetensors file can hold."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_plain and str(tensor.dtype).removeprefix("torch.") in DTYPES


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
    return torch.equal(as_bits(one), as_bits(other))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """Return the elements, flattened, as integers of their size: equal where their bits are."""
    return tensor.detach().reshape(-1).view(_BITS.get(tensor.element_size(), torch.uint8))
