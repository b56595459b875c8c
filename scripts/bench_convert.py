"""Time and memory of `zckpt.convert` beside DeepSpeed's converter, torch's consolidation and `cp`.

One run, one folder of ZeRO-3 on four ranks: fp32 masters of random values, moments that are holes.
Every way is a process of its own, imports and all, and the ways take turns, each second round
backwards. A ratio is the median of the rounds' ratios.

Only zckpt hashes, compares checksums and waits for the disk. So each process is timed twice: until
it ends, and until its output is on the disk as well. Files that a process reads are in the page
cache, other files of this run are not, and nothing is left to be written when it starts.

Memory is the anonymous memory (RssAnon: pages of files do not count) of all its processes together
at its peak, above that of an interpreter that has imported torch.

    make bench-convert         or      python scripts/bench_convert.py --gigabytes 5 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from zckpt.testing.zero_folders import write_large_folder

MIB = 1 << 20
MASTER_BYTES = 4

IMPORT_TORCH = "import torch"
CONSOLIDATE = """
import json, os, sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
os.mkdir(sys.argv[2])
file_of = json.load(open(sys.argv[3]))
consolidate_safetensors_files(sys.argv[1], sys.argv[2], file_of, num_threads=int(sys.argv[4]))
"""


@dataclass(frozen=True)
class Way:
    """One way to make a folder of weights from another folder."""

    name: str
    source: Path
    command: list[str]


@dataclass(frozen=True)
class Row:
    """One process that was measured."""

    name: str
    seconds: float
    synced_seconds: float
    """Until its output was on the disk."""
    cpu_seconds: float
    """Of all its threads, in the system too: what other work on the machine hardly changes."""
    anonymous_bytes: int


# ------------------------------------------------------------------ measuring


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; 0 when it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


def children(session: int) -> list[int]:
    """Return the other processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session != int(stat.parent.name):
                found.append(int(stat.parent.name))
    return found


def run(name: str, command: list[str], out: Path | None = None) -> Row:
    """Run a command to its end and return what it took."""
    highest = 0
    is_over = threading.Event()

    def watch(pid: int) -> None:
        nonlocal highest
        for number in count():
            if number % 50 == 0:
                pids = [pid, *children(pid)]
            highest = max(highest, sum(map(anonymous_bytes, pids)))
            if is_over.wait(0.004):
                return

    with tempfile.TemporaryFile() as output:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        watcher = threading.Thread(target=watch, args=(process.pid,), daemon=True)
        watcher.start()
        code = process.wait()
        seconds = time.perf_counter() - start
        is_over.set()
        watcher.join()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if code:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise SystemExit(f"{name} failed:\n{text[-4000:]}")
    for path in files_in(out):
        sync(path)
    return Row(name, seconds, time.perf_counter() - start, cpu_seconds, highest)


def files_in(folder: Path | None) -> list[Path]:
    """Return the files below a folder."""
    return [] if folder is None else sorted(p for p in folder.rglob("*") if p.is_file())


def sync(path: Path) -> None:
    """Have the operating system put a file on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def warm(source: Path, root: Path) -> None:
    """Have the page cache hold the data of `source`, holes left out, and nothing else of `root`."""
    os.sync()
    for path in files_in(root):
        descriptor = os.open(path, os.O_RDONLY)
        if source not in path.parents:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    buffer = bytearray(MIB)
    for path in files_in(source):
        descriptor = os.open(path, os.O_RDONLY)
        for start, end in data_of(descriptor):
            for position in range(start, end, MIB):
                os.preadv(descriptor, [memoryview(buffer)[: end - position]], position)
        os.close(descriptor)
    touch_free_memory()


def touch_free_memory() -> None:
    """Write to most of the free memory and free it again.

    Where this is a virtual machine, its host takes back what was freed and has to find pages again
    when they are next used. That takes longer than copying, and whoever comes next would pay.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(fields["MemFree"].split()[0]) * 1024
    with mmap.mmap(-1, max(int(free_bytes * 0.8), MIB)) as memory:
        for position in range(0, len(memory), mmap.PAGESIZE):
            memory[position] = 1


def data_of(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that are not holes."""
    end = 0
    with suppress(OSError):  # there is no data behind `end`
        while True:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield start, end


# ------------------------------------------------------------------ what is measured


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a Llama-like model whose masters take that many gigabytes."""
    width, inner, keys, vocabulary = 2048, 8192, 512, 128_256
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    numel = (vocabulary + 1) * width
    while numel * MASTER_BYTES < gigabytes * 1e9:
        layer = {
            "self_attn.q_proj.weight": (width, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        number = (len(found) - 1) // len(layer)
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        numel += 2 * width * width + 2 * keys * width + 3 * inner * width + 2 * width
    return found | {"model.norm.weight": (width,)}


def make_zero_folder(folder: Path, gigabytes: float, ranks: int) -> None:
    """Write the ZeRO folder, unless this has been done before.

    No parameter has two names: with `--safe_serialization` DeepSpeed's script fails for those.
    """
    wanted = json.dumps({"gigabytes": gigabytes, "ranks": ranks})
    label = folder / "bench_convert.json"
    if label.exists() and label.read_text() == wanted:
        return
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} holds something else than --gigabytes and --ranks ask for.")
    write_large_folder(folder, shapes(gigabytes), world_size=ranks, fill="random", moments="zeros")
    label.write_text(wanted)


def make_dcp_folder(converted: Path, folder: Path, ranks: int) -> dict[str, int]:
    """Write weights as torch's DCP does from so many ranks of FSDP, and return their sizes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir()
    size_of: dict[str, int] = {}
    for rank in range(ranks):
        shards, offsets = {}, {}
        for path in converted.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- it is not iterable
                    rows, *rest = file.get_slice(name).get_shape()
                    step = -(-rows // ranks)
                    part = file.get_slice(name)[rank * step : (rank + 1) * step]
                    size_of[name] = size_of.get(name, 0) + part.nbytes
                    if len(part):
                        shards[name] = part.contiguous()
                        offsets[name] = {"saved_offsets": [rank * step, *(0 for _ in rest)]}
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file(shards, path, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    return size_of


def deal(size_of: dict[str, int], files: int) -> dict[str, int]:
    """Return the number of a file, from 1, for each name, so that the files are about as large."""
    sizes = dict.fromkeys(range(1, files + 1), 0)
    found = {}
    for name in sorted(size_of, key=size_of.__getitem__, reverse=True):
        smallest = min(sizes, key=sizes.__getitem__)
        found[name] = smallest
        sizes[smallest] += size_of[name]
    return found


def ways(root: Path, zero: Path, out: Path, ranks: int) -> list[Way]:
    """Prepare what the ways read, and return them."""

    def convert(dtype: str, to: Path) -> list[str]:
        command = [sys.executable, "-m", "zckpt", "convert", str(zero), str(to)]
        return [*command, "--dtype", dtype, "--quiet"]

    def deepspeed(module: str, *options: str) -> list[str]:
        return [sys.executable, "-m", f"deepspeed.utils.{module}", str(zero), str(out), *options]

    def cp(source: Path) -> list[str]:
        return ["cp", "-r", str(source), str(out)]

    fp32, bf16, dcp = root / "fp32", root / "bf16", root / "dcp"
    run("zckpt", convert("keep", fp32))
    run("zckpt", convert("bf16", bf16))
    cores = len(os.sched_getaffinity(0))
    file_of = root / "file_of.json"
    file_of.write_text(json.dumps(deal(make_dcp_folder(fp32, dcp, ranks), cores)))
    consolidate = [sys.executable, "-c", CONSOLIDATE, str(dcp), str(out), str(file_of), str(cores)]
    return [
        Way("zckpt fp32", zero, convert("keep", out)),
        Way("cp fp32", fp32, cp(fp32)),
        Way("deepspeed fp32 .bin", zero, deepspeed("zero_to_fp32")),
        Way("deepspeed fp32 .safetensors", zero, deepspeed("zero_to_fp32", "--safe_serialization")),
        Way("torch dcp fp32", dcp, consolidate),
        Way("zckpt bf16", zero, convert("bf16", out)),
        Way("cp bf16", bf16, cp(bf16)),
        Way("deepspeed bf16 .bin", zero, deepspeed("zero_to_torch", "--dtype", "bf16")),
    ]


RATIOS = [
    ("zckpt fp32", "deepspeed fp32 .bin"),
    ("zckpt fp32", "deepspeed fp32 .safetensors"),
    ("zckpt fp32", "torch dcp fp32"),
    ("zckpt fp32", "cp fp32"),
    ("zckpt bf16", "deepspeed bf16 .bin"),
    ("zckpt bf16", "cp bf16"),
]


def measure(root: Path, zero: Path, ranks: int, repeats: int) -> list[list[Row]]:
    """Run every way once a round. The first round, which does not count, makes pages and blocks."""
    out = root / "out"
    todo = ways(root, zero, out, ranks)
    rounds = []
    for number in range(repeats + 1):
        rows = [run("import torch", [sys.executable, "-c", IMPORT_TORCH])]
        for way in reversed(todo) if number % 2 else todo:
            warm(way.source, root)
            rows.append(run(way.name, way.command, out))
            shutil.rmtree(out)
            if sys.stderr.isatty():
                print(f"round {number}: {rows[-1]}", file=sys.stderr)
        rounds.append(rows)
    return rounds[1:]


def summary(rounds: list[list[Row]]) -> dict[str, dict[str, object]]:
    """Return medians of each way and of the ratios, and the highest memory."""
    by_name = [{row.name: row for row in rows} for rows in rounds]
    names = dict.fromkeys(name for pair in RATIOS for name in pair)
    base = max(rows["import torch"].anonymous_bytes for rows in by_name)

    def ratio(one: str, other: str, field: str) -> float:
        found = [getattr(r[one], field) / getattr(r[other], field) for r in by_name]
        return round(statistics.median(found), 3)

    def median(name: str, field: str) -> float:
        return round(statistics.median(getattr(rows[name], field) for rows in by_name), 2)

    return {
        "seconds": {name: median(name, "seconds") for name in names},
        "synced_seconds": {name: median(name, "synced_seconds") for name in names},
        "cpu_seconds": {name: median(name, "cpu_seconds") for name in names},
        "extra_mib": {
            name: round((max(rows[name].anonymous_bytes for rows in by_name) - base) / MIB, 1)
            for name in names
        },
        "ratios": {f"{a} / {b}": ratio(a, b, "seconds") for a, b in RATIOS},
        "synced_ratios": {f"{a} / {b}": ratio(a, b, "synced_seconds") for a, b in RATIOS},
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.9, help="fp32 masters, at least")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="where to work; 5 times as large"
    )
    parser.add_argument("--keep", type=Path, help="make the ZeRO folder here, or use it again")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zckpt-bench-", dir=arguments.dir) as folder:
        root = Path(folder).resolve()
        zero = (arguments.keep or root / "zero").resolve()
        make_zero_folder(zero, arguments.gigabytes, arguments.ranks)
        rounds = measure(root, zero, arguments.ranks, arguments.repeats)
    result = summary(rounds)
    if arguments.json:
        print(json.dumps(result | {"rounds": [[vars(row) for row in rows] for rows in rounds]}))
        return
    print(f"{arguments.gigabytes} GB of fp32 masters, ZeRO-3, {arguments.ranks} ranks, ", end="")
    print(f"{len(os.sched_getaffinity(0))} cores, median of {arguments.repeats}")
    print(f"  {'':28}{'ended':>9}{'on disk':>11}{'CPU':>11}{'memory above torch':>21}")
    for name, seconds in result["seconds"].items():
        print(f"  {name:28}{seconds:7.2f} s{result['synced_seconds'][name]:9.2f} s", end="")
        print(f"{result['cpu_seconds'][name]:9.2f} s", end="")
        print(f"{result['extra_mib'][name]:17.1f} MiB")
    print(f"  {'time':51}{'ended':>9}{'on disk':>11}")
    for name, ratio in result["ratios"].items():
        print(f"  {name:51}{ratio:9.3f}{result['synced_ratios'][name]:11.3f}")


if __name__ == "__main__":
    main()
