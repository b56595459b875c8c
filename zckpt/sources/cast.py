"""A source made from another: floating parameters in another dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from zckpt.spec import DType, TensorSpec
from zckpt.tensors import torch_dtype


class Reads(Protocol):
    """The part of a source that is needed here."""

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor."""
        ...


class Cast:
    """Reads another source's tensors, each value rounded once to the dtype of its spec.

    Only floating parameters are cast; buffers keep their dtype. Safe to use from several threads
    where the other source is.
    """

    def __init__(self, source: Reads, specs: Iterable[TensorSpec], dtype: DType | None) -> None:
        """Read nothing yet. Without a dtype every tensor is read as it is."""
        self._source = source
        self.specs = tuple(self._cast(spec, dtype) for spec in specs)
        self._dtypes = {spec.name: torch_dtype(spec.dtype) for spec in self.specs}
        self._overflown: set[str] = set()
        self._buffers = threading.local()

    @staticmethod
    def _cast(spec: TensorSpec, dtype: DType | None) -> TensorSpec:
        is_cast = spec.role == "parameter" and spec.dtype.is_floating and dtype is not None
        return replace(spec, dtype=dtype) if is_cast and dtype is not None else spec

    @property
    def overflown(self) -> tuple[str, ...]:
        """Names of tensors with values that became infinite in what was read so far."""
        return tuple(sorted(self._overflown))

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor in the dtype of its spec.

        They stay valid until the thread reads the next: what is cast goes into a buffer of its own.
        """
        values = self._source.read(name, start, end)
        if values.dtype == self._dtypes[name]:
            return values
        cast = self._buffer(values.numel(), self._dtypes[name]).copy_(values)
        if cast.dtype == torch.float16 and torch.isinf(cast).sum() > torch.isinf(values).sum():
            self._overflown.add(name)
        return cast

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return this thread's buffer, made anew where it is too small or of another dtype."""
        held: Tensor | None = getattr(self._buffers, "held", None)
        if held is None or held.dtype != dtype or held.numel() < numel:
            held = self._buffers.held = torch.empty(numel, dtype=dtype, device="cpu")
        return held[:numel]
