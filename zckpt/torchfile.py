"""Read what `torch.save` wrote without running anything in it.

The pickle is followed by a reader that has no callable on its stack: a global is only its name, and
what would call it makes a description of a tensor (for the constructors of tensors, listed one by
one), an inert `Placeholder` (for harmless values, listed one by one, and for objects of classes,
whose code is not looked for), or a refusal. Neither torch nor the classes named are imported.

Formats: torch/serialization.py (`_save`, `_legacy_save`), torch/_utils.py (`_rebuild_*`).
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import threading
import zipfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from zlib_ng.zlib_ng import crc32, crc32_combine

from zckpt.errors import CorruptCheckpointError, UnsafePickleError
from zckpt.names import shown
from zckpt.spec import DTYPES, DType

MAX_PICKLE_BYTES = 64 << 20
"""Pickles of the largest real checkpoints take a few megabytes: their tensors lie elsewhere."""

_MOST_DIMENSIONS = 64
"""torch's own limit."""

_MOST_MADE = 2_000_000
"""Lists, dicts, sets (counted four times) and marks of a pickle: each takes up to 200 bytes for one
in the file. A state dict of 100,000 tensors makes half a million."""

# ------------------------------------------------------------------ what a pickle can hold


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements in a file, of which tensors are views."""

    key: str
    type: str
    """torch's class of it, with its module."""
    numel: int

    @property
    def dtype(self) -> DType | None:
        """None for an untyped storage, whose elements are bytes, and for an unknown class."""
        return DTYPES.get(_STORAGES.get(self.type, ""))

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.numel * (1 if self.dtype is None else self.dtype.size_bytes)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor, without its values. Not trusted: `TorchFile.locate` checks that it fits."""

    storage: Storage
    dtype: DType
    offset: int
    """First element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without holes."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return not self.numel
            expected *= size
        return True

    @property
    def reach(self) -> int:
        """Elements of the storage from `offset` to the last one that the tensor uses."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


@dataclass(eq=False, slots=True)
class Placeholder:
    """An object that was not made. Takes whatever the pickle does to it."""

    name: str
    """The global that would have made it."""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item, which an object of a subclass of dict would take."""

    def append(self, value: Any) -> None:
        """Ignore an item, which an object of a subclass of list would take."""

    def extend(self, values: Iterable[Any]) -> None:
        """Ignore items, as `append` does."""

    def add(self, value: Any) -> None:
        """Ignore an item, which an object of a subclass of set would take."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to: a class or a function. Nothing was imported."""

    name: str


# ------------------------------------------------------------------ the pickle


_STORAGES = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
}


def _tensor(
    storage: Storage, offset: int, shape: Any, stride: Any, *rest: Any
) -> TensorRef | Placeholder:
    """Stand for `_rebuild_tensor` and `_rebuild_tensor_v2`; `rest` ends with their metadata."""
    has_flags = len(rest) > 2 and bool(rest[2])  # a conjugated or negated view
    if has_flags:
        return Placeholder("a conjugated or negated view")
    return _view(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(
    storage: Storage, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Global
) -> TensorRef | Placeholder:
    """Stand for `_rebuild_tensor_v3`, which gives bytes a dtype that no storage has."""
    known = DTYPES.get(dtype.name.removeprefix("torch."))
    return _view(storage, known, offset, shape, stride)


def _view(
    storage: Storage, dtype: DType | None, offset: int, shape: Any, stride: Any
) -> TensorRef | Placeholder:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor of something that is no storage")
    if dtype is None:
        return Placeholder(storage.type)
    (first,), sizes, steps = _sizes((offset,)), _sizes(shape), _sizes(stride)
    if len(sizes) != len(steps):
        raise ValueError(f"a tensor of {len(sizes)} dimensions and {len(steps)} strides")
    return TensorRef(storage, dtype, first, sizes, steps)


def _sizes(values: Any) -> tuple[int, ...]:
    """Return sizes of a tensor, after making sure that they are some."""
    is_short = isinstance(values, (tuple, list)) and len(values) <= _MOST_DIMENSIONS
    if not is_short or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError("what stands for the sizes of a tensor is none")
    return tuple(values)


def _from_type(function: Global, _type: Any, arguments: Sequence[Any], _state: Any) -> Any:
    """Stand for `_rebuild_from_type_v2`: a tensor with attributes of its own, which are dropped."""
    return _called(function, arguments, frozenset())


def _encoded(text: str, encoding: str) -> bytes:
    """Stand for `_codecs.encode`, the way in which protocol 2 writes bytes."""
    if type(text) is not str or type(encoding) is not str or encoding not in {"latin1", "latin-1"}:
        raise ValueError("bytes in an encoding that no pickle uses")
    return text.encode("latin-1")


def _set(*items: Any) -> set[Any]:
    return {_key(item) for item in (items[0] if items else ())}


def _ordered(*items: Any) -> OrderedDict[Any, Any]:
    return OrderedDict((_key(key), value) for key, value in (items[0] if items else ()))


_KEYS = (str, bytes, float, bool, type(None), Global, Placeholder)


def _key(key: Any, depth: int = 0) -> Any:
    """Return what is to be a key, which Python hashes: what is nested or huge may take for ever."""
    if isinstance(key, tuple) and len(key) <= _MOST_DIMENSIONS and depth < 3:
        for part in key:
            _key(part, depth + 1)
    elif not isinstance(key, _KEYS) and not (type(key) is int and abs(key) < 1 << 60):
        raise ValueError("a key of a dict or set that is neither a plain value nor a short tuple")
    return key


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _sizes,
    "collections.OrderedDict": _ordered,
    "__builtin__.set": _set,
    "builtins.set": _set,
    "_codecs.encode": _encoded,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
"""All that is really made, by the name of what would have been called."""

_INERT = frozenset(
    {
        "__builtin__.bytearray",
        "__builtin__.complex",
        "__builtin__.frozenset",
        "__builtin__.object",
        "__builtin__.range",
        "__builtin__.slice",
        "__builtin__.xrange",
        "argparse.Namespace",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.frozenset",
        "builtins.object",
        "builtins.range",
        "builtins.slice",
        "collections.Counter",
        "collections.defaultdict",
        "collections.deque",
        "copy_reg._reconstructor",
        "copyreg._reconstructor",
        "datetime.date",
        "datetime.datetime",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
        "fractions.Fraction",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib.WindowsPath",
        "pathlib._local.Path",
        "pathlib._local.PosixPath",
        "pathlib._local.PurePosixPath",
        "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_wrapper_subclass",
        "torch.device",
        "torch.serialization._get_layout",
        "types.SimpleNamespace",
        "uuid.UUID",
    }
)
"""What may be called in a pickle, and becomes a `Placeholder`: values that training code keeps
beside its weights, and tensors that cannot be read by ranges."""


def _called(function: Any, arguments: Sequence[Any], allowed: frozenset[str]) -> Any:
    """Return what stands for a call: a tensor, a plain value, a placeholder; or refuse."""
    name = function.name if isinstance(function, Global) else f"a {type(function).__name__}"
    if name in _CONSTRUCTORS:
        return _CONSTRUCTORS[name](*arguments)
    if name in _INERT or name in allowed:
        return Placeholder(name, tuple(arguments))
    raise UnsafePickleError(
        f"its pickle calls {name}, which is no constructor of a tensor. Nothing was run. If the "
        f"call belongs to the training code, allow_global={name!r} (--allow-global) reads past it."
    )


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001 -- see `_Reader`


class _Reader(_PythonUnpickler):  # type: ignore[misc]  # the base is not typed
    """Follows a pickle with no callable on the stack.

    Built on the reader that the standard library has in Python: in the one in C an index in the
    file decides how large its memo gets.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)
    stack: list[Any]

    def __init__(self, file: Any, allowed: frozenset[str], storages: dict[str, Storage]) -> None:
        super().__init__(file, encoding="latin1")
        self._allowed = allowed
        self._storages = storages
        self._copied_bytes = 0
        self._made = 0

    def find_class(self, module: str, name: str) -> Any:
        return Global(shown(f"{module}.{name}"))

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or len(pid) not in {5, 6}:
            raise ValueError("a persistent id that torch does not write")
        kind, storage_type, key, _location, numel, *view = pid
        is_known = kind == "storage" if type(kind) is str else False
        if not is_known or type(key) is not str or not isinstance(storage_type, Global):
            raise ValueError("a persistent id that torch does not write")
        if view and view[0] is not None:
            raise ValueError("a storage that is a view of another")
        storage = Storage(key, storage_type.name, *_sizes((numel,)))
        if self._storages.setdefault(key, storage) != storage:
            raise ValueError(f"storage {shown(key)} is described in two ways")
        return storage

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise ValueError("a call without a tuple of arguments")
        self._count_copies(arguments)
        self.stack[-1] = _called(self.stack[-1], arguments, self._allowed)

    def _count_copies(self, arguments: tuple[Any, ...]) -> None:
        """Refuse a pickle that has much copied: the same long argument may stand in many calls."""
        for value in arguments:
            if isinstance(value, (str, bytes, bytearray)):
                self._copied_bytes += len(value)
            elif isinstance(value, (list, tuple, set, frozenset, dict)):
                self._copied_bytes += 64 * len(value)
        if self._copied_bytes > 2 * MAX_PICKLE_BYTES:
            raise ValueError("its calls would copy more than any real file")

    def _load_newobj(self) -> None:
        arguments = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, Global) or type(arguments) is not tuple:
            raise ValueError("an object of something that is no class")
        self.stack[-1] = Placeholder(made.name, arguments)

    def _load_newobj_ex(self) -> None:
        self.stack.pop()
        self._load_newobj()

    def _load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, Placeholder):
            made.state = state
        elif not isinstance(made, OrderedDict):  # a state dict's `_metadata` is dropped
            raise UnsafePickleError(f"its pickle sets the state of a {type(made).__name__}.")

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({_key(k): value for k, value in zip(items[::2], items[1::2], strict=True)})

    def _load_additems(self) -> None:
        items = self.pop_mark()
        for item in items:
            self.stack[-1].add(_key(item))

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(_key, items)))

    def _load_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    def _making(self, cost: int, opcode: bytes) -> None:
        """Count what is made for one byte of the pickle, and do what the opcode says."""
        self._made += cost
        if self._made > _MOST_MADE:
            raise ValueError("it makes more objects than any real file")
        _PythonUnpickler.dispatch[opcode[0]](self)

    def _load_mark(self) -> None:
        self._making(1, pickle.MARK)

    def _load_empty_list(self) -> None:
        self._making(1, pickle.EMPTY_LIST)

    def _load_empty_dict(self) -> None:
        self._making(1, pickle.EMPTY_DICT)

    def _load_empty_set(self) -> None:
        self._making(4, pickle.EMPTY_SET)

    def _refuse(self) -> None:
        raise UnsafePickleError("its pickle uses opcodes that no torch.save writes.")

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = _load_newobj_ex
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    dispatch[pickle.DICT[0]] = _load_dict
    dispatch[pickle.ADDITEMS[0]] = _load_additems
    dispatch[pickle.FROZENSET[0]] = _load_frozenset
    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray
    dispatch[pickle.MARK[0]] = _load_mark
    dispatch[pickle.EMPTY_LIST[0]] = _load_empty_list
    dispatch[pickle.EMPTY_DICT[0]] = _load_empty_dict
    dispatch[pickle.EMPTY_SET[0]] = _load_empty_set
    for _opcode in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_opcode[0]] = _refuse


class _Bounded:
    """The front of a file, for a reader that believes every length it finds."""

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file = file
        self._left = most_bytes

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise EOFError(f"{size} bytes are asked for where {self._left} may follow")
        self._left -= size
        return self._file.read(size)

    def readinto(self, into: bytearray) -> int:
        data = self.read(len(into))
        into[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line


def _follow(file: _Bounded, allowed: frozenset[str]) -> tuple[Any, Mapping[str, Storage]]:
    """Return the object of one pickle, and the storages that it mentions by key."""
    storages: dict[str, Storage] = {}
    tree = _Reader(file, allowed, storages).load()
    weigh(tree)
    return tree, storages


_MOST_NODES = 5_000_000
_MOST_DEPTH = 200
"""What is beyond them was made to keep readers busy; `state_dict()` of a large model has thousands
of nodes and is about ten deep."""


def weigh(tree: Any) -> int:
    """Return how many nodes a tree has when it is followed to its leaves.

    Raises a ValueError for one that contains itself, or is too deep or too large. A pickle of a few
    hundred bytes can describe a list of 2**60 lists, each of them there twice.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of nodes that are done: nodes below, depth below
    entered: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting[-1]
        if id(node) in sizes:
            waiting.pop()
            continue
        below = [child for child in _children(node) if _is_node(child)]
        if id(node) not in entered:
            entered.add(id(node))
            if any(id(child) in entered and id(child) not in sizes for child in below):
                raise ValueError("what it holds contains itself")
            waiting += [child for child in below if id(child) not in sizes]
            if len(waiting) > _MOST_NODES:
                raise ValueError("what it holds is too large")
            continue
        waiting.pop()
        nodes = 1 + len(_children(node)) + sum(sizes[id(child)][0] for child in below)
        depth = 1 + max((sizes[id(child)][1] for child in below), default=0)
        if nodes > _MOST_NODES or depth > _MOST_DEPTH:
            raise ValueError("what it holds is too large or too deep")
        sizes[id(node)] = nodes, depth
    return sizes[id(tree)][0] if _is_node(tree) else 1


def _is_node(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset, Mapping, Placeholder))


def _children(node: Any) -> Sequence[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, Placeholder):
        return (*node.arguments, node.state)
    return tuple(node) if _is_node(node) else ()


Known = dict[bytes, Any]
"""Objects by the bytes of their pickles. Those of many ranks are the same bytes."""


def _follow_bytes(data: bytes, allowed: frozenset[str], known: Known) -> Any:
    if data not in known:
        known[data] = _follow(_Bounded(io.BytesIO(data), len(data)), allowed)[0]
    return known[data]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever an untrusted pickle makes its reader raise into an error about the file."""
    try:
        yield
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001 -- it may be any
        raise CorruptCheckpointError(
            f"{path}: its pickle cannot be read ({type(error).__name__}: {shown(error)}): the file "
            "is damaged, was not written by torch.save, or holds what zckpt does not read."
        ) from None


# ------------------------------------------------------------------ the file


@dataclass(frozen=True, slots=True)
class Record:
    """Where a storage's bytes lie in a file."""

    start: int
    """First byte, counted from the file's beginning; in a zip file that of its local header."""
    size_bytes: int
    crc32: int | None
    """What the file says about its bytes; None in torch's old format, which says nothing."""


@dataclass(frozen=True, eq=False)
class TorchFile:
    """One file that `torch.save` wrote. Holds no descriptor; may be read from any thread."""

    path: Path
    tree: Any = field(repr=False)
    """The pickled object, tensors as `TensorRef`. Shared with equal files, so never changed."""
    saved_as: str | None
    """The name, without its suffix, under which torch wrote the file; None where it says none."""
    _records: Mapping[str, Record] = field(repr=False)
    _starts: dict[str, int] = field(default_factory=dict, repr=False)
    """First byte of each record of a zip file that was asked for."""

    def record(self, storage: Storage) -> Record:
        """Return where a storage lies. Raises a `CorruptCheckpointError` when it is not there."""
        record = self._records.get(storage.key)
        if record is None or record.size_bytes != storage.size_bytes:
            found = "nothing" if record is None else f"{record.size_bytes}"
            raise CorruptCheckpointError(
                f"{self.path}: expected {storage.size_bytes} bytes of storage "
                f"{shown(storage.key)}, found {found}."
            )
        return record

    def check(self, ref: TensorRef) -> None:
        """Raise a `CorruptCheckpointError` for a tensor that does not lie in its storage."""
        record = self.record(ref.storage)
        end = (ref.offset + ref.reach) * ref.dtype.size_bytes
        if len(ref.shape) != len(ref.stride) or ref.offset < 0 or end > record.size_bytes:
            raise CorruptCheckpointError(
                f"{self.path}: a tensor of shape {list(ref.shape)} ends at byte {end} of a storage "
                f"of {record.size_bytes}."
            )

    def fingerprint(self, ref: TensorRef) -> tuple[Any, ...]:
        """Return what is equal for equal tensors of two files, as far as is known unread."""
        record = self.record(ref.storage)
        return (record.crc32, record.size_bytes, ref.offset, ref.shape, ref.stride)

    def read_into(self, into: memoryview, storage: Storage, start: int) -> None:
        """Read bytes `[start, start + len(into))` of a storage.

        Raises:
            CorruptCheckpointError: they are not there.
        """
        record = self.record(storage)
        if not 0 <= start <= start + len(into) <= record.size_bytes:
            raise CorruptCheckpointError(f"{self.path}: storage {shown(storage.key)} is too short.")
        read_exactly(self.path, into, self._start(storage.key, record) + start)

    def _start(self, key: str, record: Record) -> int:
        if record.crc32 is None:
            return record.start
        if key not in self._starts:
            self._starts[key] = _data_start(self.path, record)
        return self._starts[key]


def read_exactly(path: Path, into: memoryview, position: int) -> None:
    """Fill `into` from a position of a file. Opens it each time: folders have thousands of files.

    Raises:
        CorruptCheckpointError: the file ends before that.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while into:
            count = os.preadv(descriptor, [into], position)
            if count == 0:
                raise CorruptCheckpointError(f"{path} ends at byte {position}: it was cut short.")
            into = into[count:]
            position += count
    finally:
        os.close(descriptor)


def load(
    path: Path, allowed: frozenset[str] = frozenset(), known: Known | None = None
) -> TorchFile:
    """Read a file's directory and its pickle, whose CRC-32 is checked. Reads no tensor.

    Args:
        path: what `torch.save` wrote, in its zip format or the one before torch 1.6.
        allowed: names of globals whose calls become placeholders too. Nothing is called.
        known: what was read before with the same `allowed`, to be shared and added to.

    Raises:
        CorruptCheckpointError: it is no such file, or is damaged.
        UnsafePickleError: its pickle would call something else than constructors of tensors.
    """
    with path.open("rb") as file:
        front = file.read(64)
        if front.startswith(b"PK"):
            return _load_zip(path, file, allowed, {} if known is None else known)
        if front.startswith(_OLD_MAGIC):
            return _load_old(path, file, allowed)
    if not front:
        raise CorruptCheckpointError(f"{path} is empty; expected a file that torch.save wrote.")
    if front.startswith(b"version https://git-lfs"):
        raise CorruptCheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with: git lfs pull"
        )
    raise CorruptCheckpointError(
        f"{path} does not begin like a file that torch.save wrote, but with {front[:8]!r}."
    )


_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, 22 bytes that the directory has too, and the lengths of name and extra field. PKWARE's
APPNOTE.TXT, 4.3.7."""


def _data_start(path: Path, record: Record) -> int:
    """Return where the bytes begin that a zip record's local header stands before."""
    header = bytearray(_LOCAL_HEADER.size)
    read_exactly(path, memoryview(header), record.start)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if signature != b"PK\x03\x04":
        raise CorruptCheckpointError(f"{path} has no zip record at byte {record.start}.")
    return record.start + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


_MOST_DIRECTORY_BYTES = 256 << 20


class _Front:
    """A file of which no more is read at once than the directory of a real one takes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        here = self.tell()
        left = self.seek(0, os.SEEK_END) - here
        self.seek(here)
        if (left if size < 0 else min(size, left)) > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"a directory of more than {_MOST_DIRECTORY_BYTES:,} bytes")
        return self._file.read(size)


def _load_zip(path: Path, file: BinaryIO, allowed: frozenset[str], known: Known) -> TorchFile:
    size_bytes = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(_Front(file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
        raise CorruptCheckpointError(
            f"{path} is not a whole file of torch.save ({error}); it was cut short or damaged."
        ) from None
    tops = {e.filename.split("/")[0] for e in entries if e.filename.endswith("/data.pkl")}
    if len(tops) != 1:
        raise CorruptCheckpointError(f"{path} is a zip file, but torch.save did not write it.")
    (top,) = tops
    records: dict[str, Record] = {}
    for entry in entries:
        name = entry.filename.removeprefix(f"{top}/")
        if name in records or entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptCheckpointError(
                f"{path}: its record {shown(name)} is compressed or there twice, which torch.save "
                "never does."
            )
        end = entry.header_offset + _LOCAL_HEADER.size + entry.file_size
        if entry.header_offset < 0 or end > size_bytes:
            raise CorruptCheckpointError(
                f"{path}: its record {shown(name)} would end at byte {end} of {size_bytes}; the "
                "file was cut or damaged."
            )
        records[name] = Record(entry.header_offset, entry.file_size, entry.CRC)
    if _small(path, records.get("byteorder"), b"little") != b"little":
        raise CorruptCheckpointError(f"{path} was written on a big-endian machine.")
    data = _small(path, records["data.pkl"], b"")
    with _explained(path):
        tree = _follow_bytes(data, allowed, known)
    storages = {name[5:]: r for name, r in records.items() if name.startswith("data/")}
    return TorchFile(path, tree, top, storages)


def _small(path: Path, record: Record | None, default: bytes) -> bytes:
    """Return a record's bytes, checked, or the default where there is none."""
    if record is None:
        return default
    if record.size_bytes > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(f"{path} has a pickle of {record.size_bytes:,} bytes.")
    data = bytearray(record.size_bytes)
    read_exactly(path, memoryview(data), _data_start(path, record))
    if crc32(data) != record.crc32:
        raise CorruptCheckpointError(
            f"{path}: its pickle has CRC-32 {crc32(data):08x} where the file's directory says "
            f"{record.crc32:08x}; it was damaged after it was saved."
        )
    return bytes(data)


_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_MAGIC = tuple(pickle.dumps(_MAGIC, protocol) for protocol in range(2, 6))
"""What a file of torch before 1.6 begins with: torch/serialization.py, `MAGIC_NUMBER`."""


def _load_old(path: Path, file: BinaryIO, allowed: frozenset[str]) -> TorchFile:
    """Read the format before torch 1.6: five pickles, then the storages one behind the other."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    front = _Bounded(file, min(size_bytes, MAX_PICKLE_BYTES))
    with _explained(path):
        _magic, _version, system = (_follow(front, allowed)[0] for _ in range(3))
        tree, storages = _follow(front, allowed)
        keys = [str(key) for key in _follow(front, allowed)[0]]
        if not system["little_endian"] or set(keys) != set(storages):
            raise ValueError("its storages are not those that it lists, or are big-endian")
    records: dict[str, Record] = {}
    position = file.tell()
    for key in keys:
        numel = bytearray(8)
        read_exactly(path, memoryview(numel), position)
        storage, found = storages[key], int.from_bytes(numel, "little")
        if found != storage.numel:
            raise CorruptCheckpointError(
                f"{path}: storage {shown(key)} has {found} elements where its pickle says "
                f"{storage.numel}."
            )
        records[key] = Record(position + 8, storage.size_bytes, None)
        position += 8 + storage.size_bytes
    if position != size_bytes:
        raise CorruptCheckpointError(
            f"{path} has {size_bytes} bytes where its storages end at {position}."
        )
    return TorchFile(path, tree, None, records)


# ------------------------------------------------------------------ checksums


@dataclass(slots=True)
class _Parts:
    """What was read of one record: disjoint ranges with their CRC-32, neighbours joined."""

    file: TorchFile
    storage: Storage
    starts: list[int] = field(default_factory=list)
    """Where the ranges begin, in order."""
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Start to (end, CRC-32)."""

    def holes(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return what of `[start, end)` was not read, in order."""
        found = []
        for first in self.starts[max(bisect_right(self.starts, start) - 1, 0) :]:
            if first >= end:
                break
            if first > start:
                found.append((start, first))
            start = max(start, self.ranges[first][0])
        return [*found, (start, end)] if start < end else found

    def add(self, start: int, end: int, crc: int) -> None:
        """Add a range that touches no other but at its ends, joined with those."""
        place = bisect_right(self.starts, start)
        if place and self.ranges[self.starts[place - 1]][0] == start:
            place -= 1
            before = self.starts.pop(place)
            crc = crc32_combine(self.ranges.pop(before)[1], crc, end - start)
            start = before
        if place < len(self.starts) and self.starts[place] == end:
            after_end, after_crc = self.ranges.pop(self.starts.pop(place))
            crc = crc32_combine(crc, after_crc, after_end - end)
            end = after_end
        self.starts.insert(place, start)
        self.ranges[start] = end, crc


_REST_BYTES = 1 << 20


class Checksums:
    """The CRC-32 of records, put together from the parts that threads read in any order.

    Parts may overlap: two tensors may be views of one storage. Memory: a few ranges a record, as
    long as neighbours are read about the same time.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._records: dict[tuple[Path, str], _Parts] = {}
        self._lock = threading.Lock()

    def note(self, file: TorchFile, storage: Storage, start: int, data: memoryview) -> None:
        """Take note of the bytes that were read from `start` of a storage."""
        if file.record(storage).crc32 is None or not data:
            return
        crc = crc32(data)
        with self._lock:
            key = (file.path, storage.key)
            parts = self._records.setdefault(key, _Parts(file, storage))
            holes = parts.holes(start, start + len(data))
            if holes == [(start, start + len(data))]:
                parts.add(start, start + len(data), crc)
                return
            for first, last in holes:
                parts.add(first, last, crc32(data[first - start : last - start]))

    def unread(self) -> Iterator[tuple[TorchFile, Storage, int, int]]:
        """Yield what was not read of the records that were read in part, as byte ranges."""
        for parts in self._records.values():
            for start, end in parts.holes(0, parts.storage.size_bytes):
                yield parts.file, parts.storage, start, end

    def read_rest(self, file: TorchFile, storage: Storage, start: int, end: int) -> None:
        """Read bytes that only the CRC-32 of their record needs. Memory: 1 MiB."""
        for first in range(start, end, _REST_BYTES):
            buffer = memoryview(bytearray(min(_REST_BYTES, end - first)))
            file.read_into(buffer, storage, first)
            self.note(file, storage, first, buffer)

    def verify(self) -> None:
        """Compare the records with what their files say. What is `unread` has to be read before.

        Raises:
            CorruptCheckpointError: one differs, or was not read as a whole.
        """
        for parts in self._records.values():
            end, found = parts.ranges.get(0, (0, 0))
            expected = parts.file.record(parts.storage).crc32
            if end != parts.storage.size_bytes or found != expected:
                raise CorruptCheckpointError(
                    f"{parts.file.path}: storage {shown(parts.storage.key)} ({end:,} bytes) has "
                    f"CRC-32 {found:08x} where the file says {expected:08x}; it was damaged after "
                    "it was saved. Take another copy."
                )
