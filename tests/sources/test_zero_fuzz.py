"""Damaged at random, a ZeRO folder converts to what it held, or ends with an error of zckpt's.

Never wrong values, another exception, a hang, or more memory than a conversion takes. The damage is
random but seeded: a case that fails is run again by its number.
"""

import random
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError

ZERO = Path(__file__).parents[1] / "zero"
FOLDERS = [
    "z1-w2-bf16opt-tied-0189",
    "z1-w3-shapes-bf16-0176",
    "z2-w2-sharedmodule-bf16-0198",
    "z2-w2-shapes-empty-bf16-0198",
    "z3-w3-buffers-bf16-0198",
    "z3-w4-shapes-frozen-bf16-0189",
]
OLD = "derived-z2-old-torch-format"
FAMILY = [
    "z3-w3-gpt2-tied-bf16-0198",
    "derived-z3-optimizer-states-stripped",
    "z3-w3-gpt2-tied-bf16-095",
]
EXPECTED_ERRORS = (CorruptCheckpointError, NotACheckpointError, UnsupportedError)


class TookTooLong(BaseException):
    """Nothing catches it."""


@contextmanager
def at_most(seconds):
    def stop(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


# ------------------------------------------------------------------ damage


def flipped(data, rng, low=0, high=None):
    """Change some bits between two places."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(low, len(data) if high is None else high)] ^= 1 << rng.randrange(8)
    return bytes(data)


def noisy(data, rng):
    """Overwrite a block with zeros, noise, or another part of the file."""
    length = rng.choice([1, 4, 64, 512, 4096])
    start = rng.randrange(len(data))
    other = rng.randrange(len(data))
    block = rng.choice([bytes(length), rng.randbytes(length), data[other : other + length]])
    return (data[:start] + block + data[start + len(block) :])[: len(data)]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def longer(data, rng):
    return data + rng.randbytes(rng.choice([1, 22, 100, 5000]))


def holed(data, rng):
    """Take some bytes out, or put some in."""
    start = rng.randrange(len(data))
    length = rng.choice([1, 2, 64, 1000])
    if rng.random() < 0.5:
        return data[:start] + data[start + length :]
    return data[:start] + rng.randbytes(length) + data[start:]


def in_directory(data, rng):
    """Change what the zip file says about its records."""
    start = data.index(b"PK\x01\x02")
    return flipped(data, rng, start)


def in_local_headers(data, rng):
    """Change what stands before a record."""
    starts = [i for i in range(len(data)) if data.startswith(b"PK\x03\x04", i)]
    start = rng.choice(starts)
    return flipped(data, rng, start, start + 30)


BYTES = {
    f.__name__: f for f in (flipped, noisy, cut, longer, holed, in_directory, in_local_headers)
}


def span_of_pickle(path):
    with zipfile.ZipFile(path) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("/data.pkl")]
        data = archive.read(info)
    start = path.read_bytes().index(data)
    return start, start + len(data)


def with_crc(path, rng):
    """Change the pickle, and its checksum so that it fits: nobody can tell that it was changed."""
    data = path.read_bytes()
    start, end = span_of_pickle(path)
    before = zlib.crc32(data[start:end]).to_bytes(4, "little")
    changed = flipped(data, rng, start, end)
    after = zlib.crc32(changed[start:end]).to_bytes(4, "little")
    return changed.replace(before, after)


# ------------------------------------------------------------------ cases


def copied(name, place):
    """A folder of which every file may be written anew, as quickly as can be."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(ZERO / name / "ckpt", place))


def files_of(place):
    return sorted(path for path in place.rglob("*") if path.is_file())


def states_of(place):
    return sorted(place.rglob("*_states.pt"))


def outcome(place, folder, *, may_be_renamed=False):
    """Convert; return "right" or the error's type after making sure that it is either."""
    out = place.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        with at_most(10):
            zckpt.convert(place, out, jobs=1, digest=False)
    except EXPECTED_ERRORS as error:
        assert str(error).isprintable()  # noqa: PT017 -- either is fine
        assert sorted(p.name for p in place.parent.iterdir()) == [place.name]
        return type(error).__name__
    found = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
    expected = folder.expected
    strange = set(found) - set(expected)
    assert may_be_renamed or not strange
    wrong = [n for n, t in found.items() if n in expected and bits(t) != bits(expected[n])]
    if strange:  # a master whose name was changed leaves the 16-bit value to the right name
        wrong = [n for n in wrong if bits(found[n]) != bits(folder.live[n])]
    assert wrong == []
    return "right"


def run(cases, kind, names, damage, zero_folder, tmp_path, **options):
    """Damage and convert so often; return how it ended, and how often."""
    ends = {}
    for number in range(cases):
        rng = random.Random(f"{kind} {number}")
        name = rng.choice(names)
        place = copied(name, tmp_path / "ckpt")
        try:
            damage(place, rng)
            end = outcome(place, zero_folder(name), **options)
        except BaseException as error:
            error.add_note(f"case {number} of {kind}, {name}")
            raise
        ends[end] = ends.get(end, 0) + 1
    return ends


@pytest.mark.parametrize("kind", BYTES)
def test_bytes(kind, zero_folder, tmp_path):
    def damage(place, rng):
        path = rng.choice(states_of(place))
        path.write_bytes(BYTES[kind](path.read_bytes(), rng))

    ends = run(40, kind, FOLDERS, damage, zero_folder, tmp_path)
    if kind != "longer":  # what follows a zip file's end is nothing to it
        assert ends.get("CorruptCheckpointError", 0) >= 5, ends


def test_pickles(zero_folder, tmp_path):
    """Their checksum tells."""

    def damage(place, rng):
        path = rng.choice(states_of(place))
        path.write_bytes(flipped(path.read_bytes(), rng, *span_of_pickle(path)))

    ends = run(15, "pickles", FOLDERS, damage, zero_folder, tmp_path)
    assert ends == {"CorruptCheckpointError": 15}


def test_pickles_whose_checksum_fits(zero_folder, tmp_path):
    """Names and numbers in them may then be others; nothing else may come of it."""
    errors = 0
    for number in range(120):
        rng = random.Random(f"with_crc {number}")
        place = copied(rng.choice(FOLDERS), tmp_path / "ckpt")
        path = rng.choice(states_of(place))
        path.write_bytes(with_crc(path, rng))
        try:
            with at_most(10):
                dict(zckpt.open(place))
        except zckpt.ZckptError as error:
            assert str(error).isprintable()  # noqa: PT017 -- either is fine
            errors += 1
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
    assert errors > 20


def shuffled(place, rng):
    """Exchange, copy over another, or rename a file."""
    one, other = rng.sample(states_of(place), 2)
    action = rng.randrange(4)
    if action == 0:
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif action == 1:
        shutil.copy(one, other)
    elif action == 2:
        rank = rng.choice([0, 1, 2, 3, 7, 10, 100])
        head, _, tail = one.name.rpartition("_rank_")
        new = one.with_name(f"{head}_rank_{rank}{tail[1:]}".replace("mp_rank_1", "mp_rank_01"))
        one.rename(new)
    else:
        one.rename(one.with_name(rng.choice(["x_states.pt", "x", f"{one.name}.bak"])))


def test_names(zero_folder, tmp_path):
    ends = run(40, "names", [*FOLDERS, OLD], shuffled, zero_folder, tmp_path)
    assert ends.get("CorruptCheckpointError", 0) >= 20, ends


def test_files_of_other_folders(zero_folder, tmp_path):
    def damage(place, rng):
        path = rng.choice(states_of(place))
        others = [p for p in ZERO.glob(f"*/ckpt/*/{path.name}") if p.parents[2].name[0] in "zd"]
        shutil.copy(rng.choice(others), path)

    ends = run(40, "others", [*FOLDERS, *FAMILY, OLD], damage, zero_folder, tmp_path)
    assert ends.get("CorruptCheckpointError", 0) >= 20, ends


def test_latest(zero_folder, tmp_path):
    def damage(place, rng):
        data = (place / "latest").read_bytes()
        (place / "latest").write_bytes(rng.choice([flipped, cut, longer])(data, rng))

    ends = run(20, "latest", FOLDERS, damage, zero_folder, tmp_path)
    assert set(ends) <= {"right", "NotACheckpointError"}


def test_several_files_at_once(zero_folder, tmp_path):
    def damage(place, rng):
        for path in files_of(place):
            if rng.random() < 0.5:
                path.write_bytes(rng.choice([flipped, noisy, cut, holed])(path.read_bytes(), rng))

    ends = run(20, "several", FOLDERS, damage, zero_folder, tmp_path)
    assert ends.get("right", 0) < 10, ends


def test_the_old_format_outside_of_its_values(zero_folder, tmp_path):
    """It has no checksums: a flipped value is one that was saved, and a changed name a name."""
    payloads = {}
    for path in states_of(ZERO / OLD):
        tree = torch.load(path, weights_only=False)
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(tree)}
        payloads[path.name] = path.stat().st_size - sum(held.values()) - 8 * len(held)

    def damage(place, rng):
        path = rng.choice(states_of(place))
        data = path.read_bytes()
        pickles = payloads[path.name]
        kind = rng.choice([flipped, cut, longer])
        path.write_bytes(kind(data, rng, 0, pickles) if kind is flipped else kind(data, rng))

    ends = run(60, "old", [OLD], damage, zero_folder, tmp_path, may_be_renamed=True)
    assert ends.get("CorruptCheckpointError", 0) >= 20, ends


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


# ------------------------------------------------------------------ in a process of its own

FORKED = """
import os, signal, sys
from pathlib import Path
import zckpt
zckpt.open  # imported once, not by each child
for place in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if child == 0:  # of which an alarm ends even what never comes back from C
        signal.alarm(2)
        try:
            dict(zckpt.open(place))
        except zckpt.ZckptError as error:
            os._exit(0 if len(str(error)) < 2000 else 3)
        except BaseException as error:
            print(place.name, type(error).__name__, flush=True)
            os._exit(4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(place.name, os.waitstatus_to_exitcode(status), flush=True)
"""


def doubled():
    """Two of the same, of two of the same, and so on: small, but endless to who follows it."""
    value = ("a",)
    for _ in range(60):
        value = (value, value)
    return value


def cyclic():
    value = {}
    value["a"] = [value]
    return value


def test_trees_that_never_end(tmp_path):
    """Whatever key such a value stands under, in one file or in all."""
    name = "z3-w4-shapes-frozen-bf16-0189"
    for path in states_of(ZERO / name):
        tree = torch.load(path, weights_only=False)
        is_model = "model" in path.name
        holder = tree if is_model else tree["optimizer_state_dict"]
        for key in [*holder, "ds_version", "ds_config", "x"]:
            for endless in (doubled, cyclic):
                for where in ["one", "all"] if "rank_1_" in path.name else ["all"]:
                    folder = tmp_path / "folders" / f"{key} {endless.__name__} {where} {is_model}"
                    folder.mkdir(parents=True, exist_ok=True)
                    inside = holder if key in holder else tree
                    before = inside.get(key)
                    inside[key] = endless()
                    torch.save(tree, folder / path.name)
                    inside[key] = before
    for folder in (tmp_path / "folders").iterdir():
        for path in states_of(ZERO / name):
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "folders")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr, ran.stdout.splitlines()) == (0, "", [])


MEASURED = """
import sys
from pathlib import Path
import zckpt
for place in sorted(Path(sys.argv[1]).iterdir()):
    try:
        zckpt.convert(place, place / "out")
    except zckpt.ZckptError:
        pass
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(peak >> 10)
"""


def test_memory(tmp_path):
    rng = random.Random("memory")
    for number in range(40):
        place = copied(rng.choice(FOLDERS), tmp_path / "folders" / f"{number:02}")
        path = rng.choice(states_of(place))
        kind = rng.choice([in_directory, in_local_headers, noisy, None])
        data = kind(path.read_bytes(), rng) if kind else with_crc(path, rng)
        path.write_bytes(data)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "folders")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 1000
