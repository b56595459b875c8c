"""`inspect`: what a checkpoint is and what is in it, without reading a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zckpt.manifest import Manifest
from zckpt.sources.opening import open as open_checkpoint
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
    facts: dict[str, str]
    """What a ZeRO folder says about the run that saved it; empty for other checkpoints."""
    notes: tuple[str, ...]
    """What deserves a look, as sentences."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.tensors)


def inspect(path: str | os.PathLike[str], *, tag: str | None = None) -> Inspection:
    """Read manifest, index and headers, and return what they say. Local, no tensor is read.

    Of a ZeRO folder the pickles are read, without running anything in them; `tag` names the one of
    several checkpoints in it.

    Raises:
        NotACheckpointError: there is nothing to inspect at the path.
        CorruptCheckpointError: what is there contradicts itself.
        UnsupportedError: a ZeRO folder of a kind that zckpt does not put together.
    """
    checkpoint = open_checkpoint(path, tag=tag)
    return Inspection(
        path=checkpoint.path,
        kind=checkpoint.kind,
        tensors=tuple(checkpoint.specs.values()),
        aliases=dict(checkpoint.aliases),
        file_sizes_bytes=dict(checkpoint.file_sizes_bytes),
        manifest=checkpoint.manifest,
        facts=dict(checkpoint.facts),
        notes=checkpoint.notes,
    )
