"""The manifest of a checkpoint: what is stored, where it came from, and how to tell it is intact.

Typed, versioned, strict: an unknown version or an unknown key is refused. Equal checkpoints give
equal bytes: keys are sorted, and times and hosts are kept in a file of their own (`RunRecord`).
`docs/format.md` is the specification; this module follows it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from zckpt.errors import ManifestError, ManifestVersionError

SCHEMA_VERSION = 1
MANIFEST_NAME = "zckpt_manifest.json"
RUN_NAME = "zckpt_run.json"

ValueFrom = Literal["live", "master", "frozen", "unowned"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in the manifest: immutable, keyword-only, strict about keys."""


class Digest(Record, frozen=True):
    """A digest and what exactly it was taken of."""

    algorithm: Literal["blake3", "blake3-16MiB", "blake3-header"]
    """`blake3`: of all the bytes. `blake3-16MiB`: of the BLAKE3 digests of the tensor's 16 MiB
    blocks, one behind the other. `blake3-header`: of a safetensors file's length prefix and header
    only; the rest of that file is covered by the digests of its tensors."""
    hex: str


class Provenance(Record, frozen=True, omit_defaults=True):
    """Where the values came from."""

    source: Literal["engine", "zero.Init module", "module", "ZeRO folder"]
    engine: str | None
    """Class of the engine, or None."""
    zero_stage: int | None
    world_size: int
    deepspeed_version: str | None
    torch_version: str
    model: str | None
    """Class of the module that was saved, with its package; a ZeRO folder does not say."""
    optimizer: str | None
    """Class of the optimizer inside the engine, or None."""
    global_step: int | None
    weights: Literal["live", "master"]
    dtype: str | None
    """The dtype that floating parameters were cast to, or None."""
    view: Literal["raw"]
    removed_prefix: str
    """An outermost `module.` that was taken off every name, or nothing."""
    tag: str | None = None
    """Which checkpoint of a ZeRO folder it was; not written for other sources."""


class FileRecord(Record, frozen=True):
    """One file of the folder, other than the manifest and the run record."""

    name: str
    """Relative to the folder, with `/` between parts. Files of tensors lie in the folder itself."""
    size_bytes: int
    digest: Digest


class TensorRecord(Record, frozen=True):
    """One stored tensor."""

    name: str
    role: Literal["parameter", "buffer", "extra_state"]
    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int
    """First byte in the file, inclusive, counted from the file's beginning."""
    end: int
    """Byte after the last, exclusive."""
    digest: Digest | None
    """None where it was written without digests."""
    trainable: bool
    value_from: ValueFrom
    """live: the module's own value. master: the optimizer's fp32 copy. frozen: a parameter that
    does not train. unowned: one that trains but that the engine's optimizer does not hold."""
    optimizer: str | None
    """Class of the engine's optimizer when it owns the parameter."""


class AliasRecord(Record, frozen=True):
    """A shared tensor: the name that is stored and the names that mean the same tensor."""

    owner: str
    aliases: tuple[str, ...]


class UnstoredBuffer(Record, frozen=True):
    """A non-persistent buffer: not stored, but what it was can be compared."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: Digest | None
    """None where it has no values or a dtype that safetensors does not know."""


class LeftOut(Record, frozen=True):
    """Something of the state dict that is not in the files, and why."""

    name: str
    reason: str


class Loss(Record, frozen=True):
    """A loss, to read and to compare exactly."""

    decimal: str
    hex: str

    @classmethod
    def of(cls, value: float) -> Loss:
        """Return the record of a loss."""
        return cls(decimal=repr(value), hex=value.hex())

    @property
    def value(self) -> float:
        """The loss as a number."""
        return float.fromhex(self.hex)

    @property
    def is_consistent(self) -> bool:
        """Whether both spellings are numbers, and the same one."""
        try:
            return repr(self.value) == repr(float(self.decimal))
        except (ValueError, OverflowError):
            return False


class EvalRecord(Record, frozen=True):
    """What `eval_fn` returned for the weights that were saved."""

    mean: Loss
    ranks: tuple[Loss, ...]
    """One per rank, in rank order."""
    weights: Literal["live"]
    """The values the loss was computed with."""
    is_of_saved_values: bool
    """False where masters or cast values were saved: the module computes with the live ones."""
    dtype: str
    """dtypes of the module's floating parameters, joined by a comma."""
    device: str
    with_stale_copies: Loss | None
    """The mean loss with the stale gathered copies in place, where there were any."""


class TieRecord(Record, frozen=True):
    """Whether the model's configuration and its tensors agree about tied embeddings."""

    declared: bool
    actual: bool


class Manifest(Record, frozen=True):
    """Everything that is known about one checkpoint."""

    schema_version: int
    zckpt_version: str
    provenance: Provenance
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    aliases: tuple[AliasRecord, ...]
    unstored_buffers: tuple[UnstoredBuffer, ...]
    left_out: tuple[LeftOut, ...]
    stale_copies: tuple[str, ...]
    """Names whose gathered copies disagreed with their partitions; the partitions were saved."""
    ties: TieRecord | None
    evaluation: EvalRecord | None
    warnings: tuple[str, ...]

    def to_json(self) -> bytes:
        """Return the manifest as JSON text with sorted keys; equal manifests are equal bytes."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"


class RunRecord(Record, frozen=True):
    """What differs between two equal checkpoints: when, where, how fast. Never checked."""

    saved_at: str
    """UTC, ISO 8601."""
    host: str
    seconds: dict[str, float]
    """Wall seconds of rank 0 by phase, up to the moment the record was written."""

    def to_json(self) -> bytes:
        """Return the record as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"


class _Version(msgspec.Struct):
    schema_version: int


def parse_manifest(text: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """Return the manifest in `text`; `where` names the file in errors.

    Raises:
        ManifestVersionError: it is of a schema version that this zckpt does not know.
        ManifestError: it is not JSON, or a key is missing, unknown or of the wrong type.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise ManifestVersionError(
                f"{where} has schema version {version}; this zckpt reads version "
                f"{SCHEMA_VERSION}. Use the zckpt that wrote it, or a newer one."
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where} is not a zckpt manifest: {error}") from None
    _check(manifest, where)
    return manifest


_MAX_NAME_BYTES = 255
"""The longest file name that common file systems take."""


def _check(manifest: Manifest, where: str) -> None:
    """Raise a `ManifestError` for what types alone cannot say."""
    files = {record.name for record in manifest.files}
    for name in files:
        parts = name.split("/")
        if "\\" in name or "\0" in name or not all(p.strip(".") for p in parts):
            raise ManifestError(f"{where} names the file {name!r}, which leaves the folder.")
        if max(len(part.encode(errors="replace")) for part in parts) > _MAX_NAME_BYTES:
            raise ManifestError(f"{where} has a file name of more than {_MAX_NAME_BYTES} bytes.")
    names = [record.name for record in manifest.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ManifestError(f"{where} has {twice} twice.")
    for record in manifest.tensors:
        if record.file not in files or "/" in record.file:
            raise ManifestError(
                f"{where} has {record.name} in {record.file!r}, which is none of its files."
            )
    evaluation = manifest.evaluation
    losses = (
        (evaluation.mean, *evaluation.ranks, evaluation.with_stale_copies) if evaluation else ()
    )
    for loss in losses:
        if loss is not None and not loss.is_consistent:
            raise ManifestError(
                f"{where} has a loss of {loss.decimal!r} in decimal and {loss.hex!r} in hex, which "
                "are not one number."
            )


def json_schema() -> bytes:
    """Return the JSON Schema of the manifest, as shipped in `docs/`."""
    schema = msgspec.json.schema(Manifest)
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"
