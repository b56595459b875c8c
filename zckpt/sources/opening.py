"""`zckpt.open`: whatever is at a path, as a lazy mapping."""

from __future__ import annotations

import os
from collections.abc import Iterable

from zckpt.names import as_patterns
from zckpt.sources import consolidated
from zckpt.sources.checkpoint import Checkpoint
from zckpt.sources.zero import ZeroFolder
from zckpt.sources.zero_files import looks_like_zero


def open(  # noqa: A001 -- zckpt.open is the name
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    allow_global: str | Iterable[str] = (),
) -> Checkpoint:
    """Open a zckpt or Hugging Face folder, one safetensors file, or a ZeRO folder, lazily.

    Reads manifest, index and headers, or a ZeRO folder's pickles, of which nothing is run. Local;
    needs neither deepspeed nor transformers. A ZeRO folder gives fp32 masters, frozen parameters
    and buffers as they are stored; the bytes that are read are not checked against the files'
    CRC-32, which is taken of whole records (`zckpt.convert` checks them).

    Args:
        path: a folder or a .safetensors file. Where a folder holds both, the safetensors are meant,
            unless there is a `tag`.
        tag: which checkpoint of a ZeRO folder; without it the one that `latest` names.
        allow_global: names of functions or classes whose calls a ZeRO folder's pickles may mention.
            They are read past, not called.

    Raises:
        NotACheckpointError: there is no such thing at the path.
        CorruptCheckpointError: what is there contradicts itself.
        UnsupportedError: a ZeRO folder of a kind that zckpt does not put together.
    """
    place = consolidated.find(path)
    is_zero = tag is not None or not consolidated.is_consolidated(place)
    if place.is_dir() and is_zero and (tag is not None or looks_like_zero(place)):
        return ZeroFolder.open(place, tag=tag, allowed=frozenset(as_patterns(allow_global)))
    return consolidated.open(place)
