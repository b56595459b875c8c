"""Write tensors into their planned spans, hashing what is written in the same pass."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from zckpt import digests
from zckpt.digests import Block
from zckpt.errors import NoSpaceError, UnsupportedError
from zckpt.plan import PlannedFile, PlannedTensor
from zckpt.tensors import as_bytes, chunks


class Reads(Protocol):
    """The part of a source that the writer needs."""

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` as a contiguous 1-D CPU tensor in the stored dtype."""
        ...


def lay_out(folder: Path, files: tuple[PlannedFile, ...]) -> None:
    """Create the files at their final sizes with their headers; the tensors are not there yet.

    The space is reserved where the file system can, so that a full disk is found here.

    Raises:
        NoSpaceError: the disk is full.
        OSError: the files are there already, or cannot be made.
    """
    try:
        for file in files:
            with (folder / file.name).open("xb") as handle:
                handle.write(file.header)
                handle.flush()
                _reserve(handle.fileno(), file.size_bytes)
    except OSError as error:
        raise _explained(error) from error


_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Extend a file to its size and reserve its blocks where the file system can.

    `os.posix_fallocate` will not do: where the file system cannot, it writes to every block.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is not None:
        size = ctypes.c_int64(size_bytes)
        if fallocate(descriptor, 0, ctypes.c_int64(0), size) == 0:
            return
        code = ctypes.get_errno()
        if code not in _CANNOT_RESERVE:
            raise _explained(OSError(code, os.strerror(code)))
    os.ftruncate(descriptor, size_bytes)


_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of linux/fs.h"""


def _begin_writeback(descriptor: int, start: int, size_bytes: int) -> None:
    """Have the disk write a range while other ranges are made, where the system can.

    Only a hint: whether all is on the disk is what `Writer.sync` is for. Linux: sync_file_range(2).
    """
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        first, size = ctypes.c_int64(start), ctypes.c_int64(size_bytes)
        sync_file_range(descriptor, first, size, ctypes.c_uint(_WRITE))


class Writer:
    """Writes into the laid-out files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Open nothing yet.

        Raises:
            UnsupportedError: the machine is not little-endian, as the files are.
        """
        if sys.byteorder != "little":
            raise UnsupportedError("safetensors files are little-endian; this machine is not.")
        self._folder = folder
        self._written: dict[str, None] = {}

    def write(
        self, tensor: PlannedTensor, block: Block, source: Reads, *, hashes: bool = True
    ) -> bytes:
        """Copy one block of a tensor from the source into its place and return its digest.

        May be called from several threads for different blocks. Without `hashes` the digest is
        empty. Memory: one chunk of 1 MiB, where the source has to cast or to leave a device.
        """
        size_bytes = tensor.spec.dtype.size_bytes
        with self._opened(tensor.file) as descriptor:

            def parts() -> Iterator[memoryview]:
                for start, end in chunks(block.start, block.end, size_bytes):
                    data = as_bytes(source.read(block.name, start, end))
                    write_all(descriptor, data, tensor.span.start + start * size_bytes)
                    yield data

            digest = b""
            if hashes:
                digest = digests.of_block(parts())
            else:
                for _ in parts():
                    pass
            start = tensor.span.start + block.start * size_bytes
            _begin_writeback(descriptor, start, block.size_bytes)
        return digest

    def sync(self) -> None:
        """Have the operating system put all that this process wrote on the disk."""
        for name in self._written:
            with self._opened(name) as descriptor:
                os.fsync(descriptor)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Yield a file to write to. A large model has more files than a process may hold open."""
        descriptor = os.open(self._folder / name, os.O_WRONLY)
        self._written[name] = None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


_IS_FULL = {errno.ENOSPC, errno.EDQUOT}


def _explained(error: OSError) -> OSError:
    """Return a `NoSpaceError` for a full disk or quota, and any other error as it is."""
    if error.errno not in _IS_FULL or isinstance(error, NoSpaceError):
        return error
    return NoSpaceError(
        error.errno, f"{error.strerror}: the disk filled up during the save, which left nothing."
    )


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all the bytes at a position, however many calls that takes."""
    while data:
        try:
            written = os.pwrite(descriptor, data, position)
        except OSError as error:
            raise _explained(error) from error
        data = data[written:]
        position += written
