"""Write files in the format of `torch.save` whose values need be nowhere, not even on the disk.

Facts about the format, of torch 2.13: `torch/serialization.py` (`_save`, the records),
`caffe2/serialize/inline_container.cc` (the alignment) and `third_party/miniz` (the zip file). For
tensors that hold their values the result is that of `torch.save`, byte by byte, but for the
serialization id, which is made with a hash of the C++ library and read by nobody.

The module is also a `pickle_module` for `torch.save`: its `Pickler` writes stand-in classes under
the names of the classes they stand for, so that nothing of deepspeed has to be imported.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import random
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2
from zlib_ng import zlib_ng

Fill = Callable[[BinaryIO, torch.UntypedStorage, torch.dtype], int]
"""Moves the file's position over the bytes of a storage, written or left as a hole; returns their
CRC-32."""

_Class = TypeVar("_Class", bound=type)

_STORAGES = {
    torch.bool: torch.BoolStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
"""The class that stands in the pickle for a dtype."""

_ALIGNMENT_BYTES = 64
"""Where values may begin."""

_ZIP64 = 0xFFFF_FFFF
"""Sizes and offsets from here on do not fit the 32-bit fields, which then hold this number."""

_UTF8 = 0x0800
"""The flag of a record whose name is UTF-8."""

_SIZES_BEHIND = 0x0008
"""The flag of a record whose CRC and sizes come behind the data. Empty ones have none there."""

_renamed: dict[bytes, bytes] = {}
"""The pickle opcode that names a stand-in class -> the one that names the real class."""


# ------------------------------------------------------------------ pickles


def stands_for(module: str, name: str) -> Callable[[_Class], _Class]:
    """Return a decorator: `Pickler` writes the decorated class as `name` of `module`."""

    def register(cls: _Class) -> _Class:
        own = f"c{cls.__module__}\n{cls.__qualname__}\n"
        _renamed[own.encode()] = f"c{module}\n{name}\n".encode()
        return cls

    return register


class Pickler(pickle.Pickler):
    """A pickler that writes stand-in classes under the names of the real ones.

    Protocol 2, which is torch's, names a class in plain text, so the names are exchanged in the
    finished pickle and the real modules need not be there.
    """

    def __init__(self, file: BinaryIO, protocol: int = 2) -> None:
        self._file = file
        self._pickled = io.BytesIO()
        super().__init__(self._pickled, protocol)

    def dump(self, obj: object) -> None:
        """Write the pickle of `obj` into the file."""
        super().dump(obj)
        data = self._pickled.getvalue()
        for own, real in _renamed.items():
            data = data.replace(own, real)
        self._file.write(data)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A storage that becomes one record of the archive."""

    key: str
    dtype: torch.dtype
    storage: torch.UntypedStorage


class _TensorPickler(Pickler):
    """Replaces tensors on any device by references to the CPU storages `stored`."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.stored: dict[torch.UntypedStorage, _Stored] = {}

    def reducer_override(self, obj: object) -> Any:
        """Return how to rebuild a tensor, as `Tensor.__reduce_ex__` does for one on a CPU."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        storage = obj.untyped_storage()
        stored = self.stored.setdefault(storage, _Stored(str(len(self.stored)), obj.dtype, storage))
        hooks: OrderedDict[int, object] = OrderedDict()
        arguments = (
            stored,
            obj.storage_offset(),
            tuple(obj.shape),
            obj.stride(),
            obj.requires_grad,
            hooks,
        )
        if attributes := vars(obj):
            rebuild = (_rebuild_tensor_v2, type(obj), arguments, attributes)
            return _rebuild_from_type_v2, rebuild
        return _rebuild_tensor_v2, arguments

    def persistent_id(self, obj: object) -> Any:
        """Return what stands for a storage in the pickle, and None for everything else."""
        if not isinstance(obj, _Stored):
            return None
        numel = obj.storage.nbytes() // obj.dtype.itemsize
        return "storage", _STORAGES[obj.dtype], obj.key, "cpu", numel


# ------------------------------------------------------------------ values


def zeros(file: BinaryIO, storage: torch.UntypedStorage, _: torch.dtype) -> int:
    """Leave a hole, which reads as zeros and takes no room where the file system has holes."""
    file.seek(storage.nbytes(), os.SEEK_CUR)
    return crc32_of_zeros(storage.nbytes())


@functools.cache
def crc32_of_zeros(size_bytes: int) -> int:
    """Return the CRC-32 of that many zero bytes, in time that grows with the digits of the size."""
    if size_bytes < 2:
        return zlib.crc32(bytes(size_bytes))
    half = crc32_of_zeros(size_bytes // 2)
    even = zlib_ng.crc32_combine(half, half, size_bytes // 2)
    return zlib.crc32(bytes(size_bytes % 2), even)


class Noise:
    """A `Fill` that writes normally distributed values, the same ones for the same seed and calls.

    **Memory:** 16 MiB for each dtype, from which 8 MiB at a time are written, each time from
    another place, so that no two blocks of a file need be alike.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 -- data, not secrets
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: dict[torch.dtype, memoryview] = {}

    def __call__(self, file: BinaryIO, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        """Write values of that dtype."""
        block = self._block(dtype)
        half = len(block) // 2
        crc, left = 0, storage.nbytes()
        while left:
            start = self._random.randrange(0, half, _ALIGNMENT_BYTES)
            chunk = block[start : start + min(half, left)]
            file.write(chunk)
            crc = zlib_ng.crc32(chunk, crc)
            left -= len(chunk)
        return crc

    def _block(self, dtype: torch.dtype) -> memoryview:
        if dtype not in self._blocks:
            numel = (16 << 20) // dtype.itemsize
            values = torch.randn(numel, generator=self._generator).to(dtype)
            self._blocks[dtype] = values.view(torch.uint8).numpy().data
        return self._blocks[dtype]


def _held(file: BinaryIO, storage: torch.UntypedStorage, _: torch.dtype) -> int:
    """Write the values that the storage holds."""
    data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy().data
    file.write(data)
    return zlib_ng.crc32(data)


# ------------------------------------------------------------------ archives


def write_torch_file(path: Path, tree: object, fill: Fill) -> None:
    """Write `tree` so that `torch.load` gives it back with every tensor on the CPU.

    **Memory:** the pickle, the directory, and what `fill` holds.

    Args:
        path: the file to make or to replace. Its stem is the folder in the archive.
        tree: what to pickle. Tensors on the meta device get their values from `fill`, those on the
            CPU keep theirs.
        fill: writes the values of one storage of the meta device, of its dtype.
    """
    pickled = io.BytesIO()
    pickler = _TensorPickler(pickled)
    pickler.dump(tree)
    with path.open("wb") as file:
        archive = _Archive(file, path.stem)
        archive.add("data.pkl", pickled.getvalue())
        archive.add(".format_version", b"1")
        archive.add(".storage_alignment", str(_ALIGNMENT_BYTES).encode())
        archive.add("byteorder", sys.byteorder.encode())
        for stored in pickler.stored.values():
            write = fill if stored.storage.device.type == "meta" else _held
            archive.add_values(stored, write)
        archive.add("version", b"3\n")
        archive.add(".data/serialization_id", b"0" * 40)
        archive.close()


class _Archive:
    """A zip file as miniz writes it for torch: stored, 64-bit where needed, values aligned."""

    def __init__(self, file: BinaryIO, folder: str) -> None:
        self._file = file
        self._folder = folder
        self._directory: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        """Append a record that holds `data`."""

        def write() -> int:
            self._file.write(data)
            return zlib.crc32(data)

        self._add(name, len(data), write)

    def add_values(self, stored: _Stored, fill: Fill) -> None:
        """Append the record of a storage."""
        write = functools.partial(fill, self._file, stored.storage, stored.dtype)
        self._add(f"data/{stored.key}", stored.storage.nbytes(), write)

    def _add(self, name: str, size_bytes: int, write: Callable[[], int]) -> None:
        full_name = f"{self._folder}/{name}".encode()
        start = self._file.tell()
        flags = _UTF8 | (_SIZES_BEHIND if size_bytes else 0)
        wide = _wide_fields(size_bytes, size_bytes, start)
        # miniz does not know the second size yet.
        local = _wide_fields(size_bytes, 0, start)
        local += _padding(start + 30 + len(full_name) + len(local) + 4)
        self._file.write(
            b"PK\3\4"
            + struct.pack("<HHHHHIII", 0, flags, 0, 0, 0, 0, 0, 0)
            + struct.pack("<HH", len(full_name), len(local))
            + full_name
            + local
        )
        crc = write()
        if size_bytes:
            sizes = struct.pack("<QQ" if wide else "<II", size_bytes, size_bytes)
            self._file.write(b"PK\7\10" + struct.pack("<I", crc) + sizes)
        narrow_size, narrow_start = min(size_bytes, _ZIP64), min(start, _ZIP64)
        self._directory.append(
            b"PK\1\2"
            + struct.pack("<HHHHHH", 0, 0, flags, 0, 0, 0)
            + struct.pack("<III", crc, narrow_size, narrow_size)
            + struct.pack("<HHHHHII", len(full_name), len(wide), 0, 0, 0, 0, narrow_start)
            + full_name
            + wide
        )

    def close(self) -> None:
        """Write the directory."""
        start = self._file.tell()
        directory, records = b"".join(self._directory), len(self._directory)
        end = start + len(directory)
        counts = (records, records, len(directory), start)
        self._file.write(
            directory
            + b"PK\6\6"
            + struct.pack("<QHHII4Q", 44, 0x031E, 0x2D, 0, 0, *counts)
            + b"PK\6\7"
            + struct.pack("<IQI", 0, end, 1)
            + b"PK\5\6"
            + struct.pack("<HHHHIIH", 0, 0, *_narrowed(*counts), 0)
        )


def _wide_fields(size_bytes: int, stored_bytes: int, start: int) -> bytes:
    """Return the extra field that holds those of the three numbers that need 64 bits."""
    sizes = [size_bytes, stored_bytes] if size_bytes >= _ZIP64 else []
    numbers = [*sizes, start] if start >= _ZIP64 else sizes
    if not numbers:
        return b""
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _padding(start: int) -> bytes:
    """Return the extra field behind whose four bytes of header, at `start`, data is aligned."""
    size_bytes = -start % _ALIGNMENT_BYTES
    return b"FB" + struct.pack("<H", size_bytes) + b"Z" * size_bytes


def _narrowed(here: int, total: int, size_bytes: int, start: int) -> tuple[int, ...]:
    return min(here, 0xFFFF), min(total, 0xFFFF), min(size_bytes, _ZIP64), min(start, _ZIP64)
