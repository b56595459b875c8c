"""Time and memory of `zckpt.save_consolidated` beside DeepSpeed's `save_16bit_model`.

One run, one engine, the two in turn: a GPT-2 of at least 200 M parameters under ZeRO-3 in bf16 on
four gloo ranks. Memory is each rank's anonymous memory (RssAnon: pages of files do not count) at
its peak during the call, above what it was before. DeepSpeed writes one pickle and does not wait
for the disk; zckpt hashes everything and does wait. So the peer is also timed with a sync.

    make bench-save            or      python scripts/bench_save.py --ranks 4 --repeats 3
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

from typing_extensions import Self

from zckpt.testing import run_ranks

MIB = 1 << 20


def anonymous_bytes() -> int:
    """This process's anonymous memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this bench needs Linux")


class Peak:
    """The highest anonymous memory inside the block, beyond that at its beginning."""

    def __enter__(self) -> Self:
        self.start = self.highest = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, anonymous_bytes())

    @property
    def extra_bytes(self) -> int:
        return self.highest - self.start


def measure(folder: str, layers: int, width: int, bucket_bytes: int, repeats: int) -> list[dict]:
    """Save `repeats` times each way, in turn; one row a save. Runs on every rank."""
    import deepspeed
    import torch
    import torch.distributed as dist
    import transformers

    import zckpt

    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
    )
    del model

    def peer(out: str) -> None:
        engine.save_16bit_model(out, "model.bin")

    def peer_synced(out: str) -> None:
        engine.save_16bit_model(out, "model.bin")
        if dist.get_rank() == 0:
            descriptor = os.open(f"{out}/model.bin", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        dist.barrier()

    def ours(out: str) -> None:
        zckpt.save_consolidated(engine, out, bucket_bytes=bucket_bytes)

    rows = []
    for repeat in range(repeats + 1):  # the first round warms up and does not count
        for name, save in {
            "save_16bit_model": peer,
            "save_16bit_model + fsync": peer_synced,
            "save_consolidated": ours,
        }.items():
            out = f"{folder}/{name.replace(' ', '')}-{repeat}"
            gc.collect()
            ctypes.CDLL(None).malloc_trim(
                0
            )  # memory that an earlier save freed would hide this one's
            dist.barrier()
            start = time.perf_counter()
            with Peak() as peak:
                save(out)
                dist.barrier()
            seconds = time.perf_counter() - start
            if repeat:
                row = {"name": name, "seconds": seconds, "extra_bytes": peak.extra_bytes}
                rows.append(row | {"parameters": parameters})
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(out)
                os.sync()
            dist.barrier()
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=512, help="as save_consolidated's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zckpt-bench-", dir=Path.cwd()) as folder:
        ranks = run_ranks(
            measure,
            arguments.ranks,
            folder,
            arguments.layers,
            arguments.width,
            arguments.bucket_mib * MIB,
            arguments.repeats,
            timeout_s=1200,
        )
    names = list(dict.fromkeys(row["name"] for row in ranks[0]))
    seconds = {
        name: statistics.median(row["seconds"] for row in ranks[0] if row["name"] == name)
        for name in names
    }
    extra = {
        name: max(row["extra_bytes"] for rank in ranks for row in rank if row["name"] == name)
        for name in names
    }
    ours, peer = "save_consolidated", "save_16bit_model"
    result = {
        "parameters": ranks[0][0]["parameters"],
        "ranks": arguments.ranks,
        "bucket_mib": arguments.bucket_mib,
        "median_seconds": {name: round(value, 3) for name, value in seconds.items()},
        "peak_extra_mib_per_rank": {name: round(value / MIB, 1) for name, value in extra.items()},
        "time_ratio": round(seconds[ours] / seconds[peer], 3),
        "memory_ratio": round(extra[ours] / extra[peer], 3),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['parameters'] / 1e6:.0f} M parameters, bf16, {arguments.ranks} ranks, ", end="")
    print(f"buckets of {arguments.bucket_mib} MiB, median of {arguments.repeats}")
    for name in names:
        print(f"  {name:26} {seconds[name]:7.2f} s   {extra[name] / MIB:8.1f} MiB a rank at most")
    print(f"  time   {ours} / {peer}: {result['time_ratio']:.2f}")
    print(f"  memory {ours} / {peer}: {result['memory_ratio']:.2f}")


if __name__ == "__main__":
    main()
