"""Write tensors into their planned spans, hashing what is written in the same pass."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from torch import Tensor

from zckpt.errors import CorruptCheckpointError, UnsupportedError
from zckpt.live import CHUNK_BYTES, as_bytes
from zckpt.manifest import Digest
from zckpt.plan import PlannedFile, PlannedTensor


class Reads(Protocol):
    """The part of a source that the writer needs."""

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` as a contiguous 1-D CPU tensor in the stored dtype."""
        ...


def lay_out(folder: Path, files: tuple[PlannedFile, ...]) -> None:
    """Create the files at their final sizes with their headers; the tensors are not there yet.

    The space is reserved where the file system can, so that a full disk is found here.

    Raises:
        OSError: the disk is full, or the files are there already.
    """
    for file in files:
        with (folder / file.name).open("xb") as handle:
            handle.write(file.header)
            handle.flush()
            _reserve(handle.fileno(), file.size_bytes)


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
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size_bytes)


class Writer:
    """This process's open files. Use inside `open_writer`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Open nothing yet."""
        self._folder = folder
        self._stack = stack
        self._files: dict[str, int] = {}

    def write(self, tensor: PlannedTensor, source: Reads) -> Digest:
        """Copy one tensor from the source into its span and return the digest of its bytes.

        Memory: one chunk of 1 MiB, if the source has to cast or to leave a device.
        """
        descriptor = self._open(tensor.file)
        hasher = blake3()
        step = max(1, CHUNK_BYTES // tensor.spec.dtype.size_bytes)
        position = tensor.span.start
        for start in range(0, tensor.spec.numel, step):
            part = source.read(tensor.spec.name, start, min(start + step, tensor.spec.numel))
            data = as_bytes(part)
            hasher.update(data)
            write_all(descriptor, data, position)
            position += len(data)
        if position != tensor.span.end:
            raise CorruptCheckpointError(
                f"{tensor.spec.name} has {position - tensor.span.start} bytes where the plan has "
                f"{tensor.span.size_bytes}; was the model changed during the save?"
            )
        return Digest(algorithm="blake3", hex=hasher.hexdigest())

    def sync(self) -> None:
        """Have the operating system put all that this process wrote on the disk."""
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def _open(self, name: str) -> int:
        if name not in self._files:
            descriptor = os.open(self._folder / name, os.O_WRONLY)
            self._stack.callback(os.close, descriptor)
            self._files[name] = descriptor
        return self._files[name]


@contextmanager
def open_writer(folder: Path) -> Iterator[Writer]:
    """Yield a writer into the laid-out files of a folder; its files are closed at the end."""
    if sys.byteorder != "little":
        raise UnsupportedError("safetensors files are little-endian; this machine is not.")
    with ExitStack() as stack:
        yield Writer(folder, stack)


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all the bytes at a position, however many calls that takes."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data = data[written:]
        position += written


def digest_bytes(data: bytes) -> Digest:
    """Return the digest of a small file's content."""
    return Digest(algorithm="blake3", hex=blake3(data).hexdigest())


def digest_header(header: bytes) -> Digest:
    """Return the digest that stands for a safetensors file, beside those of its tensors."""
    return Digest(algorithm="blake3-header", hex=blake3(header).hexdigest())
