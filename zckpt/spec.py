"""The nouns that every other module exchanges: tensor specs, alias groups, byte spans, dtypes.

Pure data: nothing here knows torch, files or ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["parameter", "buffer", "extra_state"]


@dataclass(frozen=True, slots=True)
class DType:
    """One storable element type."""

    name: str
    """torch's name without the `torch.` prefix, the word used in manifests and messages."""
    code: str
    """The code safetensors headers use."""
    size_bytes: int
    is_floating: bool


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", "BOOL", 1, False),
        DType("uint8", "U8", 1, False),
        DType("int8", "I8", 1, False),
        DType("uint16", "U16", 2, False),
        DType("int16", "I16", 2, False),
        DType("uint32", "U32", 4, False),
        DType("int32", "I32", 4, False),
        DType("uint64", "U64", 8, False),
        DType("int64", "I64", 8, False),
        DType("float8_e4m3fn", "F8_E4M3", 1, True),
        DType("float8_e5m2", "F8_E5M2", 1, True),
        DType("float16", "F16", 2, True),
        DType("bfloat16", "BF16", 2, True),
        DType("float32", "F32", 4, True),
        DType("float64", "F64", 8, True),
        DType("complex64", "C64", 8, False),
    )
}
"""Every dtype that a safetensors file can hold and torch can read back, by torch's name."""

DTYPES_BY_CODE: dict[str, DType] = {dtype.code: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes the values take in a file."""
        return self.numel * self.dtype.size_bytes


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """The names of one shared tensor."""

    owner: str
    """The one name under which the tensor is stored."""
    aliases: tuple[str, ...]
    """The other names, in state-dict order. Empty for a tensor with one name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The owner first, then the aliases."""
        return (self.owner, *self.aliases)


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes in a file, counted from the file's beginning."""

    start: int
    """First byte, inclusive."""
    end: int
    """Byte after the last, exclusive."""

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start
