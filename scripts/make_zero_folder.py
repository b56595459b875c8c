"""Write the ZeRO folder that training a model would leave, without training it.

Names, shapes and ties come from the model's class in transformers, made on the meta device; the
values are noise, or nothing at all: a sparse folder is holes, so that Llama 3.1 405B on 1,024 ranks
takes half a minute and half a gigabyte.

    python scripts/make_zero_folder.py /tmp/405b --config llama-3.1-405b --ranks 1024 --sparse
    python scripts/make_zero_folder.py /tmp/zero --config path/to/config.json --ranks 8 --stage 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from zckpt.testing.zero_folders import write_large_folder

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-405b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-1b": {  # Llama 3.2 1B
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2"},
    "tiny": {
        "model_type": "llama",
        "vocab_size": 1031,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(config: str) -> torch.nn.Module:
    """Return the model of a built-in configuration or of a file, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if config in CONFIGS:
        loaded = AutoConfig.for_model(**CONFIGS[config])
    else:
        loaded = AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(loaded)


def write(args: argparse.Namespace) -> Path:
    model = build(args.config)
    owners = {parameter: name for name, parameter in model.named_parameters()}
    stored = model.state_dict(keep_vars=True)
    aliases = {
        name: owners[tensor]
        for name, tensor in stored.items()
        if tensor in owners and owners[tensor] != name
    }
    moments = "zeros" if args.sparse or args.sparse_moments else "random"
    print(f"{sum(p.numel() for p in owners):,} parameters in {len(owners):,} tensors")
    return write_large_folder(
        args.out,
        {name: parameter.shape for parameter, name in owners.items()},
        world_size=args.ranks,
        stage=args.stage,
        buffers={name: t for name, t in stored.items() if name not in aliases and t not in owners},
        aliases=aliases,
        names=list(stored),
        live_dtype=DTYPES[args.dtype],
        sub_group_size=args.sub_group_size,
        fill="zeros" if args.sparse else "random",
        moments=None if args.no_moments else moments,
        seed=args.seed,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder to write into")
    parser.add_argument(
        "--config", default="tiny", help=f"{', '.join(CONFIGS)}, or a config.json, or its folder"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the live weights")
    parser.add_argument(
        "--sub-group-size", type=int, default=1_000_000_000, help="elements of a rank, stage 3"
    )
    parser.add_argument("--sparse", action="store_true", help="leave holes instead of noise")
    moments = parser.add_mutually_exclusive_group()
    moments.add_argument("--no-moments", action="store_true", help="as before the first step")
    moments.add_argument("--sparse-moments", action="store_true", help="leave holes for moments")
    parser.add_argument("--seed", type=int, default=0, help="chooses the noise")
    return parser.parse_args()


def main() -> None:
    args = parse()
    start = time.perf_counter()
    folder = write(args)
    seconds = time.perf_counter() - start
    stats = [path.stat() for path in folder.iterdir()]
    size_bytes = sum(stat.st_size for stat in stats)
    disk_bytes = sum(stat.st_blocks * 512 for stat in stats)
    print(f"{folder}: {len(stats):,} files")
    print(f"{size_bytes:,} bytes, of which {disk_bytes:,} on the disk, in {seconds:.1f} s")


if __name__ == "__main__":
    main()
