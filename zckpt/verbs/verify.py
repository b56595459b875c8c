"""`verify`: is a checkpoint what its manifest says, and does it still give the recorded loss."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zckpt.digests import blocks_of, of_file, of_header, of_tensor
from zckpt.errors import (
    CorruptCheckpointError,
    ManifestVersionError,
    NotACheckpointError,
    UsageError,
)
from zckpt.manifest import MANIFEST_NAME, RUN_NAME, Digest, Manifest
from zckpt.plan import INDEX_NAME
from zckpt.sources.consolidated import Consolidated, find, read_header, read_index
from zckpt.sources.consolidated import open as open_checkpoint

Kind = Literal["corrupt", "differs"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    """corrupt: content that cannot be trusted. differs: content that is there but not agreed on."""
    where: str
    """The file or tensor."""
    what: str
    """What was expected and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was compared, and all that did not agree."""

    path: Path
    findings: tuple[Finding, ...]
    files_checked: int = 0
    tensors_checked: int = 0
    """Tensors whose bytes were hashed."""
    bytes_checked: int = 0
    has_manifest: bool = False
    recorded_loss: float | None = None
    loss: float | None = None
    """What the evaluation function returned now."""
    notes: tuple[str, ...] = ()

    @property
    def is_fine(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def verify(
    path: str | os.PathLike[str],
    *,
    headers_only: bool = False,
    eval_fn: Callable[[str], float] | None = None,
    rtol: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare a checkpoint with its manifest, its index and itself; report every difference.

    Local; needs no deepspeed. A folder without a manifest has its headers and index compared.
    **Memory:** 1 MiB a thread, one thread a core.

    Args:
        path: a zckpt folder or a Hugging Face safetensors folder.
        headers_only: skip the digests of tensors, which need every byte read.
        eval_fn: called with the folder's path; its value is compared with the recorded mean loss.
        rtol: largest accepted difference of the two, relative to the recorded one.
        progress: called with (bytes hashed so far, bytes in all).

    Raises:
        NotACheckpointError: there is nothing to verify at the path.
        ManifestVersionError: a newer zckpt wrote it; this one cannot tell whether it is fine.
        UsageError: `eval_fn` without a recorded evaluation, or a negative `rtol`.
    """
    place = find(path)
    if not rtol >= 0:
        raise UsageError(f"rtol must be a number that is not negative, got {rtol}.")
    try:
        checkpoint = open_checkpoint(place)
    except (NotACheckpointError, ManifestVersionError):
        raise
    except CorruptCheckpointError as error:
        return VerifyReport(path=place, findings=(Finding("corrupt", str(place), str(error)),))
    manifest = checkpoint.manifest
    recorded = None
    if eval_fn is not None:
        if manifest is None or manifest.evaluation is None:
            raise UsageError(f"{place} has no recorded evaluation to compare with.")
        recorded = manifest.evaluation.mean.value
    findings = list(_compare_index(checkpoint)) if place.is_dir() else []
    if manifest is None:
        findings += _find_placeholders(checkpoint)
        if (place / RUN_NAME).is_file():
            findings.append(Finding("corrupt", MANIFEST_NAME, f"missing beside {RUN_NAME}"))
    else:
        findings += _compare_files(place, manifest)
        findings += _compare_tensors(checkpoint, manifest)
        findings += _compare_aliases(checkpoint, manifest)
    hashed: list[str] = []
    if manifest is not None and not headers_only:
        hashed = [name for name in checkpoint.stored if name in checkpoint.records]
        findings += _compare_digests(checkpoint, hashed, progress)
    notes = [] if manifest else [f"no {MANIFEST_NAME}: only headers and index could be compared"]
    loss = None
    if eval_fn is not None and any(finding.kind == "corrupt" for finding in findings):
        notes.append("not evaluated, since the checkpoint is corrupt")
    elif eval_fn is not None and recorded is not None and manifest is not None:
        loss = float(eval_fn(str(place)))
        findings += _compare_losses(manifest, recorded, loss, rtol)
    return VerifyReport(
        path=place,
        findings=tuple(findings),
        files_checked=len(manifest.files if manifest else checkpoint.files),
        tensors_checked=len(hashed),
        bytes_checked=sum(checkpoint.stored[name].span.size_bytes for name in hashed),
        has_manifest=manifest is not None,
        recorded_loss=recorded,
        loss=loss,
        notes=tuple(notes),
    )


def _compare_files(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Compare the files of the folder with the manifest's, both ways."""
    listed = {record.name: record for record in manifest.files}
    for name, record in listed.items():
        path = folder / name
        if not path.is_file():
            yield Finding("corrupt", name, "in the manifest, not in the folder")
            continue
        size_bytes = path.stat().st_size
        # A config is read and edited by people; a file of tensors is not.
        kind: Kind = "corrupt" if record.digest.algorithm == "blake3-header" else "differs"
        if size_bytes != record.size_bytes:
            what = f"{size_bytes} bytes, {record.size_bytes} in the manifest"
            yield Finding(kind, name, what)
        elif (found := _digest_of_file(path, record.digest)) != record.digest:
            what = f"{found.algorithm} digest {found.hex}, {record.digest.hex} in the manifest"
            yield Finding(kind, name, what)
    own = {MANIFEST_NAME, RUN_NAME}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if relative.as_posix() not in listed.keys() | own and not is_hidden:
            yield Finding("differs", relative.as_posix(), "in the folder, not in the manifest")


def _digest_of_file(path: Path, like: Digest) -> Digest:
    if like.algorithm == "blake3-header":
        return of_header(read_header(path).header)
    return of_file(path.read_bytes())


def _compare_index(checkpoint: Consolidated) -> Iterator[Finding]:
    """Compare a Hugging Face index with the headers of the files it names, both ways."""
    if not (checkpoint.path / INDEX_NAME).is_file():
        if len(checkpoint.files) > 1:
            yield Finding("corrupt", INDEX_NAME, f"missing beside {len(checkpoint.files)} files")
        return
    try:
        index = read_index(checkpoint.path / INDEX_NAME)
    except CorruptCheckpointError as error:
        yield Finding("corrupt", INDEX_NAME, str(error))
        return
    for name, file in index.items():
        tensor = checkpoint.stored.get(name)
        if tensor is None or tensor.path.name != file:
            where = "nowhere" if tensor is None else f"in {tensor.path.name}"
            yield Finding("corrupt", name, f"the index says {file}, the headers {where}")
    for name, tensor in checkpoint.stored.items():
        if name not in index:
            yield Finding("corrupt", name, f"in {tensor.path.name}, not in the index")
    loose = {path.name for path in checkpoint.path.glob("*.safetensors")}
    for file in sorted(loose - set(index.values())):
        yield Finding("corrupt", file, "in the folder, not in the index")


def _compare_tensors(checkpoint: Consolidated, manifest: Manifest) -> Iterator[Finding]:
    """Compare the manifest's tensors with the headers', both ways."""
    for record in manifest.tensors:
        tensor = checkpoint.stored.get(record.name)
        if tensor is None:
            yield Finding("corrupt", record.name, "in the manifest, in no file")
            continue
        spec = tensor.spec
        found = (spec.shape, spec.dtype.name, tensor.path.name, tensor.span.start, tensor.span.end)
        expected = (record.shape, record.dtype, record.file, record.start, record.end)
        if found != expected:
            yield Finding(
                "corrupt", record.name, f"{found} in the file, {expected} in the manifest"
            )
    for name in checkpoint.stored.keys() - checkpoint.records.keys():
        yield Finding("corrupt", name, "in a file, not in the manifest")


def _compare_aliases(checkpoint: Consolidated, manifest: Manifest) -> Iterator[Finding]:
    """Compare the manifest's alias groups with the metadata of the files."""
    in_files: Mapping[str, str] = {a: o for f in checkpoint.files for a, o in f.aliases.items()}
    in_manifest = {
        alias: group.owner
        for group in manifest.aliases
        for alias in group.aliases
        if alias != "format"  # a key with another meaning in a file's metadata
    }
    for alias in in_files.keys() | in_manifest.keys():
        if alias in checkpoint.stored:
            yield Finding(
                "corrupt", alias, "an alias in the manifest, stored in a file all the same"
            )
        elif in_files.get(alias) != in_manifest.get(alias):
            what = f"{in_files.get(alias)} in the file, {in_manifest.get(alias)} in the manifest"
            yield Finding("corrupt", alias, f"alias of {what}")


def _find_placeholders(checkpoint: Consolidated) -> Iterator[Finding]:
    for name, tensor in checkpoint.stored.items():
        if tensor.spec.numel == 0:
            what = f"shape {list(tensor.spec.shape)}: the empty placeholder of a ZeRO-3 partition?"
            yield Finding("differs", name, what)


def _compare_digests(
    checkpoint: Consolidated, names: list[str], progress: Callable[[int, int], None] | None
) -> Iterator[Finding]:
    blocks = [block for name in names for block in blocks_of(checkpoint.spec(name))]
    total = sum(block.size_bytes for block in blocks)
    done = 0
    of_tensor_blocks: dict[str, list[bytes]] = {name: [] for name in names}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for block, digest in zip(blocks, threads.map(checkpoint.digest_block, blocks), strict=True):
            of_tensor_blocks[block.name].append(digest)
            done += block.size_bytes
            if progress is not None:
                progress(done, total)
    for name, block_digests in of_tensor_blocks.items():
        found, expected = of_tensor(block_digests), checkpoint.records[name].digest
        if found != expected:
            what = f"{found.algorithm} digest {found.hex}, {expected.hex} in the manifest"
            yield Finding("corrupt", name, what)


def _compare_losses(
    manifest: Manifest, recorded: float, loss: float, rtol: float
) -> Iterator[Finding]:
    if loss == recorded or (math.isnan(loss) and math.isnan(recorded)):
        return
    if math.isfinite(recorded) and abs(loss - recorded) <= rtol * abs(recorded):
        return
    what = f"loss {loss!r} now, {recorded!r} recorded, a difference of {loss - recorded:.3g}"
    if manifest.evaluation is not None and not manifest.evaluation.is_of_saved_values:
        what += " (recorded with the live values; masters or cast values were saved)"
    yield Finding("differs", "evaluation", what)
