"""`inspect`: what a checkpoint is and what is in it, without reading a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zckpt.manifest import Manifest
from zckpt.sources.consolidated import open as open_checkpoint
from zckpt.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a folder says about itself."""

    path: Path
    kind: str
    tensors: tuple[TensorSpec, ...]
    """Stored tensors in the manifest's order, else the files'; roles come from the manifest."""
    aliases: dict[str, str]
    """The owner of each alias."""
    file_sizes_bytes: dict[str, int]
    manifest: Manifest | None

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.tensors)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Read manifest, index and headers, and return what they say. Local, no tensor is read.

    Raises:
        NotACheckpointError: there is nothing to inspect at the path.
        CorruptCheckpointError: what is there contradicts itself.
    """
    checkpoint = open_checkpoint(path)
    specs = {name: stored.spec for name, stored in checkpoint.stored.items()}
    for name, record in checkpoint.records.items():
        if name in specs:
            spec = specs.pop(name)
            specs[name] = TensorSpec(
                name=name, shape=spec.shape, dtype=spec.dtype, role=record.role
            )
    if checkpoint.manifest is not None:
        kind = "zckpt checkpoint"
    else:
        kind = "safetensors file" if checkpoint.path.is_file() else "Hugging Face folder"
    return Inspection(
        path=checkpoint.path,
        kind=kind,
        tensors=tuple(specs.values()),
        aliases=dict(checkpoint.aliases),
        file_sizes_bytes={f.path.name: f.path.stat().st_size for f in checkpoint.files},
        manifest=checkpoint.manifest,
    )
