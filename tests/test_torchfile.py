"""Files of torch.save are read as torch reads them, and nothing in them ever runs."""

import argparse
import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import itertools
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import textwrap
import types
import uuid
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt import torchfile
from zckpt.errors import CorruptCheckpointError, UnsafePickleError
from zckpt.spec import DTYPES
from zckpt.torchfile import Checksums, Global, Placeholder, TensorRef

FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])


def save(path, tree, *, is_zip=True, **options):
    torch.save(tree, path, _use_new_zipfile_serialization=is_zip, **options)
    return path


def value_of(file, ref):
    """Return what a reference stands for, by nothing but the bytes at its place."""
    file.check(ref)
    data = bytearray(ref.storage.size_bytes)
    file.read_into(memoryview(data), ref.storage, 0)
    dtype = getattr(torch, ref.dtype.name)
    held = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return held.as_strided(ref.shape, ref.stride, ref.offset)


def same_tensor(found, expected):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(bits_of(found), bits_of(expected))


def bits_of(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


def assert_same(file, found, expected):
    """What was read is what torch reads: containers, values, and tensors with their layout."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, TensorRef)
        assert (found.shape, found.stride) == (tuple(expected.shape), expected.stride())
        assert found.offset == expected.storage_offset()
        assert found.is_contiguous == expected.is_contiguous()
        assert same_tensor(value_of(file, found), expected)
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(file, found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is (list if isinstance(expected, list) else tuple)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(file, one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


def tensors_of(dtype):
    data = torch.arange(24, dtype=torch.float32)
    if dtype == torch.bool:
        return (data % 2).bool()
    if dtype == torch.complex64:
        return torch.complex(data, -data)
    return (data / 3 if dtype.is_floating_point else data).to(dtype)


def attributed():
    tensor = torch.arange(3.0)
    tensor.ds_id = "0_1"
    tensor.mine = {"a": [1]}
    return tensor


def views():
    base = torch.arange(60.0)
    return {
        "base": base,
        "slice": base[7:20],
        "matrix": base.view(6, 10),
        "transposed": base.view(6, 10).T,
        "column": base.view(6, 10)[:, 3],
        "step": base[1::7],
        "last": base[59],
        "nothing": base[60:],
        "expanded": base[3:4].expand(5),
        "overlapping": base.as_strided((3, 4), (1, 2), 5),
        "other": torch.arange(60.0),
    }


TREES = {
    "plain values": {"a": [1, 2.5, None, True, "t", b"\x00\xff", (), {}, -(2**70)], 3: ("x", [1])},
    "a list": [torch.ones(2), torch.zeros(1)],
    "one tensor": torch.arange(5),
    "views": views(),
    "0-dim": {"a": torch.tensor(1.5), "b": torch.tensor(7)},
    "empty": [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.int8)],
    "ordered": collections.OrderedDict(b=torch.ones(1), a=torch.Size([2, 3])),
    "parameters": [torch.nn.Parameter(torch.ones(3, 2)), torch.ones(1, requires_grad=True)],
    "attributes": {"a": attributed(), "b": attributed()[1:]},
    "one dim of one": {"a": torch.arange(6.0).as_strided((1, 6), (17, 1))},
    "no tensors": {},
    "a set": {"a": {1, 2}, "t": torch.ones(1)},
    "long text": {"a" * 300: "ß模" * 1000, "t": torch.ones(1)},
    "many": {str(i): torch.full((i,), float(i)) for i in range(300)},
    "state dict": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict(),
}


@FORMATS
@pytest.mark.parametrize("name", TREES)
def test_it_is_what_torch_reads(name, is_zip, tmp_path):
    path = save(tmp_path / "a.pt", TREES[name], is_zip=is_zip)
    file = torchfile.load(path)
    assert_same(file, file.tree, torch.load(path, weights_only=False))


@pytest.mark.parametrize("protocol", [1, 3, 4, 5])
@pytest.mark.parametrize("name", TREES)
def test_so_it_is_in_other_protocols(name, protocol, tmp_path):
    path = save(tmp_path / "a.pt", TREES[name], pickle_protocol=protocol)
    file = torchfile.load(path)
    assert_same(file, file.tree, torch.load(path, weights_only=False))


@pytest.mark.parametrize("name", TREES)
def test_what_torch_itself_cannot_write_is_refused(name, tmp_path):
    """Protocol 0 has no way to refer to a storage, and the old format begins with its protocol."""
    paths = [save(tmp_path / "a.pt", TREES[name], pickle_protocol=0)]
    paths += [
        save(tmp_path / f"{n}.pt", TREES[name], is_zip=False, pickle_protocol=n) for n in (0, 4)
    ]
    for path in paths:
        try:
            file = torchfile.load(path)
        except CorruptCheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 -- either is fine
            continue
        assert_same(file, file.tree, torch.load(path, weights_only=False))


@FORMATS
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_what_torch_reads(name, is_zip, tmp_path):
    values = tensors_of(getattr(torch, name))
    tree = {"all": values, "rows": values.view(4, 6)[1:3], "columns": values.view(4, 6).T}
    try:
        path = save(tmp_path / "a.pt", tree, is_zip=is_zip)
        expected = torch.load(path, weights_only=False)
    except (AttributeError, RuntimeError, KeyError):  # no way to write some in the old format
        assert not is_zip
        return
    file = torchfile.load(path)
    assert_same(file, file.tree, expected)


@FORMATS
def test_tensors_share_a_storage_where_they_do_in_torch(is_zip, tmp_path):
    path = save(tmp_path / "a.pt", views(), is_zip=is_zip)
    expected, file = torch.load(path, weights_only=False), torchfile.load(path)
    for one, other in itertools.combinations(expected, 2):
        shares = expected[one].untyped_storage()._cdata == expected[other].untyped_storage()._cdata
        assert (file.tree[one].storage == file.tree[other].storage) == shares
    assert len({ref.storage.key for ref in file.tree.values()}) == 2


def test_the_name_it_was_saved_under_is_known_in_the_zip_format(tmp_path):
    path = save(tmp_path / "first.pt", {"a": torch.ones(1)})
    path.rename(tmp_path / "second.pt")
    assert torchfile.load(tmp_path / "second.pt").saved_as == "first"
    assert torchfile.load(save(tmp_path / "old.pt", {}, is_zip=False)).saved_as is None


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans())
def test_any_strided_view_is_what_torch_reads(tmp_path_factory, data, is_zip):
    base = torch.arange(data.draw(st.integers(1, 60)), dtype=torch.int16)
    rank = data.draw(st.integers(0, 3))
    shape = [data.draw(st.integers(0, 4)) for _ in range(rank)]
    strides = [data.draw(st.integers(0, 6)) for _ in range(rank)]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    offset = data.draw(st.integers(0, 5))
    if offset + reach >= len(base):
        return
    view = base.as_strided(shape, strides, offset)
    path = save(tmp_path_factory.getbasetemp() / "view.pt", [view, base], is_zip=is_zip)
    file = torchfile.load(path)
    assert_same(file, file.tree, torch.load(path, weights_only=False))
    assert file.tree[0].numel == view.numel()


# ------------------------------------------------------------------ what training code keeps


class Mine:
    def __init__(self, value=1):
        self.value = value


class MineWithSlots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


@dataclasses.dataclass
class MineAsData:
    value: int = 1


class MineAsDict(dict):
    pass


class MineAsList(list):
    pass


class MineAsNumber(int):
    pass


class MineAsTuple(NamedTuple):
    a: int
    b: int


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Reduced:
    """What a class with an `__reduce__` of its own puts into a pickle: a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HARMLESS = {
    "array": np.arange(6, dtype=np.int64).reshape(2, 3),
    "array of text": np.array(["a", "b"]),
    "number of numpy": np.float32(1.5),
    "dtype of numpy": np.dtype("<f4"),
    "date": dt.date(2024, 1, 2),
    "time": dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc),
    "span": dt.timedelta(days=1),
    "path": pathlib.PurePosixPath("a/b"),
    "real path": pathlib.Path("a/b"),
    "frozenset": frozenset({1, 2}),
    "deque": collections.deque([1, 2], maxlen=3),
    "counter": collections.Counter("aab"),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=5),
    "complex": 1 + 2j,
    "range": range(5),
    "slice": slice(1, 2),
    "bytearray": bytearray(b"abc"),
    "namespace": types.SimpleNamespace(a=1),
    "arguments": argparse.Namespace(lr=0.1),
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "class": Mine,
    "function": textwrap.dedent,
    "object": Mine(),
    "object with slots": MineWithSlots(),
    "dataclass": MineAsData(),
    "own dict": MineAsDict(a=1),
    "own list": MineAsList([1, 2]),
    "own number": MineAsNumber(3),
    "own tuple": MineAsTuple(1, 2),
    "sparse": torch.eye(3).to_sparse(),
    "complex128": torch.ones(2, dtype=torch.complex128),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "meta": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_values_do_not_hide_the_tensors_beside_them(name, protocol, tmp_path):
    tree = {"before": torch.arange(3), "it": [HARMLESS[name]], "after": {"deep": torch.ones(2)}}
    path = save(tmp_path / "a.pt", tree, pickle_protocol=protocol)
    file = torchfile.load(path)
    assert list(file.tree) == ["before", "it", "after"]
    assert_same(file, file.tree["before"], tree["before"])
    assert_same(file, file.tree["after"], tree["after"])
    (it,) = file.tree["it"]
    is_made = type(it) is frozenset and it == HARMLESS[name]
    assert is_made or isinstance(it, (Placeholder, Global)), "not taken for a tensor"


REFUSED = {
    "enum": Color.RED,
    "number of an enum": Level.HIGH,
    "regular expression": re.compile("a"),
    "exception": ValueError("a"),
    "partial": functools.partial(print, 1),
    "counter of itertools": itertools.count(3),
}


@FORMATS
@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused_by_name_unless_they_are_allowed(name, is_zip, tmp_path):
    tree = {"it": REFUSED[name], "t": torch.arange(3)}
    path = save(tmp_path / "a.pt", tree, is_zip=is_zip)
    allowed, file = set(), None
    while file is None:
        with pytest.raises(UnsafePickleError, match=r"a\.pt.*allow_global='[\w.]+'") as caught:
            torchfile.load(path, frozenset(allowed))
        allowed.add(re.search("allow_global='([^']*)'", str(caught.value)).group(1))
        with contextlib.suppress(UnsafePickleError):  # another one, which is named next
            file = torchfile.load(path, frozenset(allowed))
    assert_same(file, file.tree["t"], tree["t"])
    assert isinstance(file.tree["it"], Placeholder)
    assert file.tree["it"].name in allowed


# ------------------------------------------------------------------ pickles that nobody saved


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def stack_named(module, name):
    return text(module) + text(name) + b"\x93"


def call(function, *arguments):
    return function + b"(" + b"".join(arguments) + b"tR"


def number(value):
    return b"J" + struct.pack("<i", value)


def storage(numel=4, key="0", kind="FloatStorage", view=b""):
    parts = (text("storage"), named("torch", kind), text(key), text("cpu"), number(numel), view)
    return b"(" + b"".join(parts) + b"tQ"


def numbers(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(*, held=None, offset=None, shape=None, stride=None):
    """A call of `_rebuild_tensor_v2`, in which anything can be anything."""
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        storage() if held is None else held,
        number(0) if offset is None else offset,
        numbers(4) if shape is None else shape,
        numbers(1) if stride is None else stride,
        b"\x89",
        call(named("collections", "OrderedDict")),
    )


def tree_of(*values):
    """A dict with the values under the names 0, 1, ..."""
    return b"}(" + b"".join(text(str(i)) + v for i, v in enumerate(values)) + b"u"


def pickled(body):
    return b"\x80\x02" + body + b"."


def zipped(path, data, storages=None, *, top="a", extra=None):
    """Write a pickle as the zip file that torch would have put it into."""
    records = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    records |= {f"data/{key}": value for key, value in (storages or {"0": bytes(16)}).items()}
    records |= extra or {}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"{top}/{name}", content)
    return path


def in_old_format(path, data):
    """Write a pickle as the file before torch 1.6 that it would have been put into."""
    front = pickle.dumps(torchfile._MAGIC, 2) + pickle.dumps(1001, 2)
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    keys = pickle.dumps(["0"], 2)
    path.write_bytes(front + system + data + keys + struct.pack("<q", 4) + bytes(16))
    return path


WRITERS = pytest.mark.parametrize("write", [zipped, in_old_format], ids=["zip", "before 1.6"])


@WRITERS
def test_the_pickles_of_these_tests_are_read_by_torch(write, tmp_path):
    """What is refused below is refused for what it does, not for how it is written."""
    held = storage(view=b"N" if write is in_old_format else b"")
    path = write(tmp_path / "a.pt", pickled(tree_of(tensor(held=held), number(3))))
    assert torch.equal(torch.load(path)["0"], torch.zeros(4))
    assert_same(torchfile.load(path), torchfile.load(path).tree, torch.load(path))


COMMAND = text("touch sentinel")

CALLS = {
    "os.system": call(named("os", "system"), COMMAND),
    "posix.system": call(named("posix", "system"), COMMAND),
    "builtins.eval": call(named("builtins", "eval"), text("open('sentinel', 'w')")),
    "builtins.exec": call(named("builtins", "exec"), text("open('sentinel', 'w')")),
    "builtins.open": call(named("builtins", "open"), text("sentinel"), text("w")),
    "__builtin__.eval": call(named("__builtin__", "eval"), text("open('sentinel', 'w')")),
    "builtins.getattr": call(named("builtins", "getattr"), named("os", "path"), text("join")),
    "builtins.__import__": call(named("builtins", "__import__"), text("hostile_module")),
    "subprocess.Popen": call(named("subprocess", "Popen"), b"]" + text("touch") + b"a"),
    "importlib.import_module": call(named("importlib", "import_module"), text("hostile_module")),
    "torch.storage._load_from_bytes": call(
        named("torch.storage", "_load_from_bytes"), text("\x80\x02cos\nsystem\n")
    ),
    "pickle.loads": call(named("pickle", "loads"), text("cos\nsystem\n")),
    "_pickle.loads": call(named("_pickle", "loads"), text("cos\nsystem\n")),
    "torch.load": call(named("torch", "load"), text("a.pt")),
    "torch._utils._rebuild_tensor_v2.__globals__.get": call(
        stack_named("torch._utils", "_rebuild_tensor_v2.__globals__.get"), text("torch")
    ),
    "collections.OrderedDict.fromkeys": call(
        stack_named("collections", "OrderedDict.fromkeys"), b"]"
    ),
    "torch.Size.count": call(stack_named("torch", "Size.count"), number(1)),
    "torch._utils._import_dotted_name": call(
        named("torch._utils", "_import_dotted_name"), text("hostile_module")
    ),
    "torch._utils._rebuild_tensor_v9": call(named("torch._utils", "_rebuild_tensor_v9")),
    "torch.jit.load": call(named("torch.jit", "load"), text("a.pt")),
    "torch.hub.load": call(named("torch.hub", "load"), text("a"), text("b")),
    "hostile_module.anything": call(named("hostile_module", "anything")),
    "numpy.load": call(named("numpy", "load"), text("a.npy")),
    "numpy.core.multiarray.fromfile": call(named("numpy.core.multiarray", "fromfile"), text("a")),
    "_codecs.decode": call(named("_codecs", "decode"), text("a"), text("rot13")),
    "a Placeholder": call(call(named("builtins", "object"))),
    "a TensorRef": call(tensor()),
    "a str": call(text("os.system"), COMMAND),
    "a dict": call(b"}", COMMAND),
}
"""By the name that has to be in the refusal."""


@WRITERS
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_anything_else_is_refused_by_name(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.pt", pickled(tree_of(tensor(), CALLS[name])))
    with pytest.raises(UnsafePickleError) as caught:
        torchfile.load(path)
    assert f"{path}: " in str(caught.value)
    assert f"calls {name}, " in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    "body",
    [
        call(stack_named("os\nsystem\x1b[31m", "f")),
        tensor(held=storage(key="\x1b[31m\n", numel=99)),
        b"(" + text("\x1b[31m\n") + b"N" * 4 + b"tQ",
    ],
    ids=["a global", "a storage", "a persistent id"],
)
def test_an_error_is_one_line_whatever_the_file_calls_things(body, tmp_path):
    path = zipped(tmp_path / "a.pt", pickled(tree_of(body)))

    def load_and_check():
        file = torchfile.load(path)
        file.check(file.tree["0"])

    with pytest.raises(CorruptCheckpointError) as caught:
        load_and_check()
    assert str(caught.value).isprintable()


SYSTEM = named("os", "system")
OPCODES = {
    "INST": b"(" + COMMAND + b"ios\nsystem\n",
    "OBJ": b"(" + SYSTEM + COMMAND + b"o",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "BUILD of a dict": b"}" + tree_of() + b"b",
    "BUILD of a tensor": tensor() + tree_of() + b"b",
    "BUILD of a list": b"]" + tree_of() + b"b",
    "BUILD of a global": SYSTEM + tree_of() + b"b",
    "BUILD of a number": number(1) + tree_of() + b"b",
}


@WRITERS
@pytest.mark.parametrize("name", OPCODES)
def test_opcodes_that_torch_never_writes_are_refused(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.pt", pickled(tree_of(OPCODES[name], tensor())))
    with pytest.raises(UnsafePickleError, match=r"a\.pt"):
        torchfile.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


MENTIONED = {
    "GLOBAL": named("hostile_module", "f"),
    "STACK_GLOBAL": stack_named("hostile_module", "f"),
    "dotted": stack_named("hostile_module", "f.__globals__"),
    "NEWOBJ": named("hostile_module", "F") + b"(t\x81",
    "NEWOBJ with arguments": named("hostile_module", "F") + b"(" + COMMAND + b"t\x81",
    "NEWOBJ_EX": named("hostile_module", "F") + b"(t}\x92",
    "NEWOBJ and BUILD": named("hostile_module", "F") + b"(t\x81" + tree_of(COMMAND) + b"b",
    "NEWOBJ and SETITEMS": named("hostile_module", "F") + b"(t\x81(" + text("a") + COMMAND + b"u",
    "NEWOBJ and APPENDS": named("hostile_module", "F") + b"(t\x81(" + COMMAND + b"e",
    "NEWOBJ and ADDITEMS": named("hostile_module", "F") + b"(t\x81(" + COMMAND + b"\x90",
    "NEWOBJ of a function": named("os", "system") + b"(" + COMMAND + b"t\x81",
    "attributes of an ordered dict": call(named("collections", "OrderedDict"))
    + tree_of(named("hostile_module", "f"))
    + b"b",
    "reconstructor": call(
        named("copy_reg", "_reconstructor"),
        named("hostile_module", "F"),
        named("__builtin__", "object"),
        b"N",
    ),
}


@WRITERS
@pytest.mark.parametrize("name", MENTIONED)
def test_what_is_only_mentioned_is_neither_imported_nor_called(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile_module.py").write_text("open('sentinel', 'w').close()\nf = F = dict\n")
    path = write(tmp_path / "a.pt", pickled(tree_of(MENTIONED[name], tensor())))
    file = torchfile.load(path)
    assert isinstance(file.tree["0"], (Placeholder, Global, collections.OrderedDict))
    assert same_tensor(value_of(file, file.tree["1"]), torch.zeros(4))
    assert "hostile_module" not in sys.modules
    assert not (tmp_path / "sentinel").exists()
    pickle.loads(pickled(MENTIONED["GLOBAL"]))  # noqa: S301 -- shows that the module would tell
    assert (tmp_path / "sentinel").exists()
    del sys.modules["hostile_module"]


def test_a_pickle_within_a_pickle_is_no_more_than_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = pickle.dumps(Reduced(open, "sentinel", "w"))
    path = save(tmp_path / "a.pt", {"bytes": inner, "array": np.frombuffer(inner, np.uint8)})
    assert torchfile.load(path).tree["bytes"] == inner
    assert not (tmp_path / "sentinel").exists()
    pickle.loads(inner).close()  # noqa: S301 -- shows that it would
    assert (tmp_path / "sentinel").exists()


MEMO = text("a") + b"q\x00" + b"0"
NESTED = b"(" * 200_000 + b"t" * 200_000
BROKEN = {
    "nothing": b"",
    "an unknown opcode": b"\xff",
    "a memo that is not there": b"h\x07",
    "a large memo that is not there": b"j\xff\xff\xff\x7f",
    "a negative memo in text": b"g-1\n",
    "a stack that is empty": b"0000",
    "a mark that is missing": b"u",
    "an append to a number": number(1) + number(2) + b"a",
    "an append to a class": SYSTEM + number(2) + b"a",
    "an item of a tensor": tensor() + text("a") + text("b") + b"s",
    "a list as a key": b"}" + b"]" + number(1) + b"s",
    "a name that is no text": number(1) + number(2) + b"\x93",
    "a persistent id of text": b"Pabc\n",
    "a persistent id of another kind": b"(" + text("module") + b"N" * 4 + b"tQ",
    "a storage of no class": b"(" + text("storage") + text("a") + text("0") + b"NNtQ",
    "a storage of a negative size": storage(numel=-1),
    "one storage of two sizes": storage() + b"0" + storage(5),
    "one storage of two classes": storage() + b"0" + storage(kind="IntStorage"),
    "a tensor of no storage": tensor(held=text("a")),
    "a tensor of a tensor": tensor(held=tensor()),
    "a tensor of a placeholder": tensor(held=call(named("builtins", "object"))),
    "an offset of text": tensor(offset=text("a")),
    "a fractional offset": tensor(offset=b"G" + struct.pack(">d", 0.5), shape=numbers(1)),
    "no offset": tensor(offset=b"N"),
    "a shape of text": tensor(shape=text("ab")),
    "a shape of nothing": tensor(shape=b"N"),
    "a negative shape": tensor(shape=numbers(-1)),
    "a negative stride": tensor(stride=numbers(-1)),
    "a fractional shape": tensor(shape=b"G" + struct.pack(">d", 4) + b"\x85"),
    "more strides than sizes": tensor(stride=numbers(1, 1)),
    "fewer strides than sizes": tensor(shape=numbers(2, 2)),
    "too few arguments": call(named("torch._utils", "_rebuild_tensor_v2"), storage()),
    "bytes in an odd encoding": call(named("_codecs", "encode"), text("a"), text("rot13")),
    "a set of lists": call(named("builtins", "set"), b"](]e"),
    "an ordered dict of a number": call(named("collections", "OrderedDict"), number(3)),
    "a size of a number": call(named("torch", "Size"), number(3)),
    "a stage of a class": call(named("deepspeed.runtime.zero.config", "ZeroStageEnum"), SYSTEM),
    "an attribute in the place of a tensor": call(
        named("torch._tensor", "_rebuild_from_type_v2"), text("a"), b"N", b"N", b"N"
    ),
    "bytes of 4 EiB": b"\x8e" + struct.pack("<Q", 1 << 62),
    "bytes of 2 GiB": b"B" + struct.pack("<I", 1 << 31),
    "text of 4 EiB": b"\x8d" + struct.pack("<Q", 1 << 62),
    "a bytearray of 4 EiB": b"\x96" + struct.pack("<Q", 1 << 62),
    "a frame of 4 EiB": b"\x95" + struct.pack("<Q", 1 << 62),
    "a frame of 1 GiB": b"\x95" + struct.pack("<Q", 1 << 30),
    "a number of 2 GiB": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "a number of negative size": b"\x8b" + struct.pack("<i", -1),
    "a buffer that is elsewhere": b"\x97",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n",
    "a protocol of the future": b"\x80\xff",
}


@WRITERS
@pytest.mark.parametrize("name", BROKEN)
def test_a_pickle_that_makes_no_sense_is_an_error_of_the_file(name, write, tmp_path):
    path = write(tmp_path / "a.pt", pickled(tree_of(BROKEN[name])))

    def load_and_check():
        file = torchfile.load(path)
        file.check(file.tree["0"])

    with pytest.raises(CorruptCheckpointError, match=r"a\.pt") as caught:
        load_and_check()
    assert len(str(caught.value)) < len(str(path)) + 500


UNREACHABLE = {
    "longer than its storage": tensor(shape=numbers(5)),
    "beyond its end": tensor(offset=number(1)),
    "before its beginning": tensor(offset=number(-1)),
    "wider than its storage": tensor(shape=numbers(2), stride=numbers(4)),
    "of a storage that is not there": tensor(held=storage(key="7")),
    "of a storage of another size": tensor(held=storage(numel=8)),
    "of more elements than any": tensor(
        shape=numbers(2**31 - 1, 2**31 - 1, 2**31 - 1), stride=numbers(0, 0, 1)
    ),
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_tensor_outside_of_its_storage_is_refused(name, tmp_path):
    path = zipped(tmp_path / "a.pt", pickled(tree_of(UNREACHABLE[name])))

    def load_and_check():
        file = torchfile.load(path)
        file.check(file.tree["0"])

    with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
        load_and_check()


@pytest.mark.parametrize("start, length", [(-1, 2), (15, 2), (16, 1), (0, 17), (1 << 62, 1)])
def test_bytes_outside_of_a_storage_are_not_read(start, length, tmp_path):
    file = torchfile.load(zipped(tmp_path / "a.pt", pickled(tree_of(tensor()))))
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
        file.read_into(memoryview(bytearray(length)), file.tree["0"].storage, start)


def doubled(times):
    """A tuple of twice the same tuple, and so on: `2 ** times` leaves in a few bytes."""
    return text("a") + b"".join(b"2\x86" for _ in range(times))


BOMBS = {
    "as a value": doubled(60),
    "as a key": b"}" + doubled(60) + number(1) + b"s",
    "as a storage's name": b"("
    + text("storage")
    + named("torch", "FloatStorage")
    + doubled(60)
    + text("cpu")
    + number(4)
    + b"tQ",
    "as a persistent id": b"(" + doubled(60) + b"N" * 4 + b"tQ",
    "as a shape": tensor(shape=doubled(60)),
    "as an offset": tensor(offset=doubled(60)),
    "as an encoding": call(named("_codecs", "encode"), text("a"), doubled(60)),
    "in a set": call(named("builtins", "set"), b"](" + doubled(60) + b"e"),
    "as a class": call(doubled(60)),
    "as a stage": call(named("deepspeed.runtime.zero.config", "ZeroStageEnum"), doubled(60)),
    "a memo of 2**32": text("a") + b"r\xff\xff\xff\xff",
    "deep": NESTED,
    "deep, as a key": b"}" + NESTED + number(1) + b"s",
    "deep, in a set": call(named("builtins", "set"), b"](" + NESTED + b"e"),
    "deep, as an offset": tensor(offset=NESTED),
    "deep, as a storage's name": b"("
    + text("storage")
    + named("torch", "FloatStorage")
    + NESTED
    + text("cpu")
    + number(4)
    + b"tQ",
    "many sets": b"(" + b"\x8f" * 8_000_000 + b"l",
    "many lists": b"(" + b"]" * 14_000_000 + b"l",
    "many marks": b"(" * 12_000_000,
    "bytes copied": text("a" * 1_000_000)
    + b"\x94"
    + (named("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R") * 3000,
    "keys of one hash": b"}("
    + b"".join(
        b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(1, 60_000)
    )
    + b"u",
    "a bytearray": b"\x96" + struct.pack("<Q", 1 << 30),
    "bytes": BROKEN["bytes of 2 GiB"],
    "a frame": BROKEN["a frame of 1 GiB"],
}

READ = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
from zckpt import torchfile
from zckpt.errors import CorruptCheckpointError
try:
    torchfile.load(Path(sys.argv[1]))
except CorruptCheckpointError as error:
    print("refused" if len(str(error)) < 1000 else f"{len(str(error))} letters")
else:
    print("read")
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
print("in bounds" if peak < 300 else f"took {peak} MiB")
print([name for name in ("torch", "numpy", "os.hostile") if name in sys.modules])
"""


@pytest.mark.parametrize("name", BOMBS)
def test_no_pickle_takes_long_or_much_memory(name, tmp_path):
    path = zipped(tmp_path / "a.pt", pickled(tree_of(BOMBS[name])))
    ran = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    outcome, bounds, imported = ran.stdout.splitlines()
    assert outcome in {"refused", "read"}
    assert (bounds, imported) == ("in bounds", "[]")


# ------------------------------------------------------------------ files


def small_zip(tmp_path):
    return save(tmp_path / "a.pt", {"a": torch.arange(40.0), "b": torch.ones(3)})


@FORMATS
def test_every_cut_is_refused(is_zip, tmp_path):
    path = save(tmp_path / "a.pt", {"a": torch.arange(40.0)}, is_zip=is_zip)
    data = path.read_bytes()
    for length in range(0, len(data), 5):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
            torchfile.load(path)


@pytest.mark.parametrize(
    "data, word",
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "does not begin like"),
        (b"\x00" * 1000, "does not begin like"),
        (b"PK\x03\x04" + bytes(1000), "not a whole file"),
        (pickle.dumps({"a": 1}), "does not begin like"),
    ],
)
def test_other_files_are_refused_by_what_they_are(data, word, tmp_path):
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=rf"a\.pt.*{word}"):
        torchfile.load(tmp_path / "a.pt")


def test_zip_files_that_torch_did_not_write_are_refused(tmp_path):
    good = pickled(tree_of(tensor()))
    assert torchfile.load(zipped(tmp_path / "good.pt", good)).tree
    with zipfile.ZipFile(tmp_path / "none.pt", "w") as archive:
        archive.writestr("readme", b"text")
    with zipfile.ZipFile(tmp_path / "compressed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", good)
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as archive:
        archive.writestr("a/data.pkl", good)
        archive.writestr("b/data.pkl", good)
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        archive.writestr("a/data.pkl", good)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data.pkl", pickled(tree_of()))
    zipped(tmp_path / "big-endian.pt", good, extra={"byteorder": b"big"})
    for name in ("none", "compressed", "two", "twice", "big-endian"):
        with pytest.raises(CorruptCheckpointError, match=rf"{name}\.pt"):
            torchfile.load(tmp_path / f"{name}.pt")


def test_a_pickle_is_checked_against_its_crc(tmp_path):
    path = small_zip(tmp_path)
    with zipfile.ZipFile(path) as archive:
        pickle_ = archive.read("a/data.pkl")
    data = path.read_bytes()
    start = data.index(pickle_)
    for position in range(start, start + len(pickle_), 5):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt.*CRC-32"):
            torchfile.load(path)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    path = small_zip(tmp_path)
    file = torchfile.load(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
        value_of(file, file.tree["a"])


def test_the_old_format_says_how_long_its_storages_are(tmp_path):
    path = save(tmp_path / "a.pt", [torch.arange(4.0)], is_zip=False)
    data = path.read_bytes()
    assert data[-24:-16] == struct.pack("<q", 4)
    for changed in (
        data[:-24] + struct.pack("<q", 3) + data[-16:],
        data + b"\x00",
        data[:-1],
    ):
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
            torchfile.load(path)


# ------------------------------------------------------------------ checksums


@st.composite
def partitions(draw):
    """Bytes, and where they are cut."""
    data = draw(st.binary(min_size=1, max_size=400))
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12))
    edges = sorted({0, len(data), *cuts})
    return data, draw(st.permutations(list(itertools.pairwise(edges))))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that puts bytes into a file of torch: the file, and their storage."""
    folder = tmp_path_factory.mktemp("saved")

    def put(data):
        tree = {"0": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        file = torchfile.load(save(folder / "a.pt", tree))
        held = file.tree["0"].storage
        assert file.record(held).crc32 == zlib.crc32(data)
        return file, held

    return put


@settings(deadline=None)
@given(partitions())
def test_parts_in_any_order_have_the_crc_of_the_whole(saved, cut):
    data, parts = cut
    file, held = saved(data)
    checks = Checksums()
    for start, end in parts:
        checks.note(file, held, start, memoryview(data)[start:end])
    ((whole_end, crc),) = [p.ranges[0] for p in checks._records.values()]
    assert (whole_end, crc) == (len(data), zlib.crc32(data))
    assert list(checks.unread()) == []
    checks.verify()


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_parts_may_overlap(saved, data, draw):
    """Two tensors may be views of one storage, and threads read them in any order."""
    file, held = saved(data)
    edges = st.integers(0, len(data))
    parts = draw.draw(st.lists(st.tuples(edges, edges).map(sorted), max_size=12))
    checks = Checksums()
    for start, end in [*parts, (0, len(data))]:
        checks.note(file, held, start, memoryview(data)[start:end])
    assert [p.ranges for p in checks._records.values()] == [{0: (len(data), zlib.crc32(data))}]
    checks.verify()


def test_a_record_that_was_read_in_part_is_not_taken_for_checked(saved):
    file, held = saved(bytes(range(100)))
    checks = Checksums()
    checks.note(file, held, 0, memoryview(bytes(range(99))))
    with pytest.raises(CorruptCheckpointError):
        checks.verify()


@settings(deadline=None)
@given(partitions(), st.data())
def test_a_flipped_bit_in_any_part_is_found(saved, cut, draw):
    data, parts = cut
    file, held = saved(data)
    flipped = bytearray(data)
    flipped[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    checks = Checksums()
    for start, end in parts:
        checks.note(file, held, start, memoryview(flipped)[start:end])
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt.*CRC-32"):
        checks.verify()


@settings(deadline=None)
@given(partitions(), st.data())
def test_what_was_not_read_is_known(saved, cut, draw):
    data, parts = cut
    file, held = saved(data)
    read = draw.draw(st.lists(st.sampled_from(parts), unique=True, min_size=1))
    checks = Checksums()
    for start, end in read:
        checks.note(file, held, start, memoryview(data)[start:end])
    unread = list(checks.unread())
    assert all((f, s) == (file, held) for f, s, _, _ in unread)
    times = [0] * len(data)
    for start, end in [*read, *(part[2:] for part in unread)]:
        for position in range(start, end):
            times[position] += 1
    assert times == [1] * len(data)
    for *_, start, end in unread:
        checks.note(file, held, start, memoryview(data)[start:end])
    assert list(checks.unread()) == []
    checks.verify()


def test_records_are_checked_each_for_itself(tmp_path):
    path = save(tmp_path / "a.pt", [torch.arange(9, dtype=torch.uint8), torch.zeros(5)])
    file = torchfile.load(path)
    checks = Checksums()
    first, second = (ref.storage for ref in file.tree)
    checks.note(file, first, 0, memoryview(bytes(range(9))))
    checks.note(file, second, 0, memoryview(b""))
    assert list(checks.unread()) == []  # the second was not touched
    checks.verify()
    checks.note(file, second, 0, memoryview(b"\x01" + bytes(19)))
    with pytest.raises(CorruptCheckpointError, match=f"storage {second.key} "):
        checks.verify()


def test_the_old_format_has_nothing_to_check_against(tmp_path):
    path = save(tmp_path / "a.pt", [torch.arange(9, dtype=torch.uint8)], is_zip=False)
    file = torchfile.load(path)
    checks = Checksums()
    checks.note(file, file.tree[0].storage, 3, memoryview(b"\x07"))
    assert list(checks.unread()) == []
    checks.verify()


def test_many_files_of_the_same_bytes_are_read_once_and_stay_apart(tmp_path):
    data = pickled(tree_of(tensor()))
    files = [
        torchfile.load(zipped(tmp_path / f"{value}.pt", data, {"0": bytes([value] * 16)}))
        for value in range(3)
    ]
    for value, file in enumerate(files):
        buffer = bytearray(16)
        file.read_into(memoryview(buffer), file.tree["0"].storage, 0)
        assert buffer == bytes([value] * 16)
    assert io.BytesIO(data).read() == data
