"""`verify`: is a checkpoint what its manifest says.

And, where that is asked for: does it still give the recorded loss, is it what it was made from.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zckpt.comparison import Match, Row, Rule, compare, match, records_ties
from zckpt.digests import blocks_of, of_file, of_header, of_tensor
from zckpt.errors import (
    CorruptCheckpointError,
    ManifestVersionError,
    NotACheckpointError,
    UsageError,
)
from zckpt.manifest import MANIFEST_NAME, RUN_NAME, Digest, Manifest
from zckpt.names import listed
from zckpt.plan import INDEX_NAME
from zckpt.sources.consolidated import Consolidated, find, read_header, read_index
from zckpt.sources.consolidated import open as open_checkpoint
from zckpt.sources.opening import open as open_anything
from zckpt.spec import TensorSpec

Kind = Literal["corrupt", "differs"]
Progress = Callable[[int, int], None]


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
    """Their size."""
    against: Path | None = None
    """What the values were compared with; of a ZeRO folder, the folder of the tag."""
    tensors_compared: int = 0
    """Tensors whose values were compared with those of `against`."""
    bytes_compared: int = 0
    """Bytes that this took, of both sides together."""
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
    against: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a checkpoint with its manifest, its index and itself; report every difference.

    Local; writes nothing; needs no deepspeed. A folder without a manifest has its headers and index
    compared. **Memory:** a few MiB a thread, one thread a core.

    With `against` it is compared with what it was made from, too: each tensor has to hold the
    values there, floating ones rounded once to the dtype here, bit by bit (any NaN is any other
    where they were rounded). Names have to be the same, but for those that the manifest says were
    left out, and so has what is tied. Where the two differ, nothing says which of them is right:
    the CRC-32 in a ZeRO folder's files are not checked here, but by `zckpt.convert`.

    Args:
        path: a zckpt folder or a Hugging Face safetensors folder.
        headers_only: skip the digests of tensors, which need every byte read.
        eval_fn: called with the folder's path; its value is compared with the recorded mean loss.
        rtol: largest accepted difference of the two, relative to the recorded one.
        against: a ZeRO folder, or a zckpt or Hugging Face folder or file.
        tag: which checkpoint of the ZeRO folder; without it the one that `latest` names.
        progress: called with (bytes read so far, bytes in all), those of `against` included.

    Raises:
        NotACheckpointError: there is nothing to verify at the path, or nothing at `against`.
        CorruptCheckpointError, UnsupportedError: what is at `against` cannot be read. What is wrong
            at the path is a finding.
        ManifestVersionError: a newer zckpt wrote it; this one cannot tell whether it is fine.
        UsageError: `eval_fn` without a recorded evaluation, a negative `rtol`, `against` with
            `headers_only`, or `tag` without `against`.
    """
    place = find(path)
    if not rtol >= 0:
        raise UsageError(f"rtol must be a number that is not negative, got {rtol}.")
    if tag is not None and against is None:
        raise UsageError(f"tag={tag!r} is about the ZeRO folder to compare with; give against.")
    if headers_only and against is not None:
        raise UsageError("headers_only reads no values, and against compares them; give one.")
    try:
        checkpoint = open_checkpoint(place)
    except (NotACheckpointError, ManifestVersionError):
        raise
    except CorruptCheckpointError as error:
        return VerifyReport(path=place, findings=(Finding("corrupt", str(place), str(error)),))
    source = None if against is None else open_anything(against, tag=tag)
    manifest = checkpoint.manifest
    recorded = None
    if eval_fn is not None:
        if manifest is None or manifest.evaluation is None:
            raise UsageError(f"{place} has no recorded evaluation to compare with.")
        recorded = manifest.evaluation.mean.value
    findings = list(_compare_index(checkpoint)) if place.is_dir() else []
    notes: list[str] = []
    if manifest is None:
        findings += _find_placeholders(checkpoint)
        if (place / RUN_NAME).is_file():
            findings.append(Finding("corrupt", MANIFEST_NAME, f"missing beside {RUN_NAME}"))
        notes.append(f"no {MANIFEST_NAME}: only headers and index could be compared")
    else:
        findings += _compare_files(place, manifest)
        findings += _compare_tensors(checkpoint, manifest)
        findings += _compare_aliases(checkpoint, manifest)
    expected = {} if headers_only else _digests(checkpoint)
    matched = None if source is None else match(source, checkpoint, labels=("SRC", "OUT"))
    hashed_bytes = sum(checkpoint.stored[name].span.size_bytes for name in expected)
    total = hashed_bytes + (matched.read_bytes if matched else 0)
    findings += _compare_digests(checkpoint, expected, _part(progress, 0, total))
    bare = 0 if headers_only else len(checkpoint.records.keys() & checkpoint.stored) - len(expected)
    if bare:
        notes.append(f"{bare} tensors were written without digests; their bytes were not checked")
    if matched is not None:
        rows = compare(matched, Rule(casts=True), progress=_part(progress, hashed_bytes, total))
        findings += _compare_with_source(matched, rows, manifest)
        notes += _notes_on_source(matched, rows, manifest)
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
        tensors_checked=len(expected),
        bytes_checked=hashed_bytes,
        against=None if source is None else source.path,
        tensors_compared=sum(a.shape == b.shape for a, b in matched.pairs) if matched else 0,
        bytes_compared=matched.read_bytes if matched else 0,
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


def _digests(checkpoint: Consolidated) -> dict[str, Digest]:
    """Return the digest of each stored tensor that the manifest has one of."""
    records = checkpoint.records
    found = {name: records[name].digest for name in checkpoint.stored if name in records}
    return {name: digest for name, digest in found.items() if digest is not None}


def _part(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return a callback for a part of the work, which begins after `before` of `total` bytes."""
    if progress is None:
        return None
    whole = progress
    return lambda done, _: whole(before + done, total)


def _compare_digests(
    checkpoint: Consolidated, expected: Mapping[str, Digest], progress: Progress | None
) -> Iterator[Finding]:
    blocks = [block for name in expected for block in blocks_of(checkpoint.spec(name))]
    total = sum(block.size_bytes for block in blocks)
    done = 0
    of_tensor_blocks: dict[str, list[bytes]] = {name: [] for name in expected}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for block, digest in zip(blocks, threads.map(checkpoint.digest_block, blocks), strict=True):
            of_tensor_blocks[block.name].append(digest)
            done += block.size_bytes
            if progress is not None:
                progress(done, total)
    for name, block_digests in of_tensor_blocks.items():
        found = of_tensor(block_digests)
        if found != expected[name]:
            what = f"{found.algorithm} digest {found.hex}, {expected[name].hex} in the manifest"
            yield Finding("corrupt", name, what)


# ------------------------------------------------------------------ what it was made from


def _compare_with_source(
    matched: Match, rows: Iterable[Row], manifest: Manifest | None
) -> Iterator[Finding]:
    """Yield what is not the same in the source (A) and the checkpoint (B), once a tensor."""
    left_out = _left_out(manifest)
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if row.a is None:
            yield Finding("differs", row.name, "here, not in SRC")
        elif row.b is None:
            if row.name not in left_out:
                yield Finding("differs", row.name, "in SRC, not here")
        elif row.is_difference and (row.a.name, row.b.name) not in seen:
            seen.add((row.a.name, row.b.name))
            yield Finding("differs", row.name, _how_far(row, row.a, row.b))
    if records_ties(matched.b):
        for names in matched.tied_in_a:
            yield Finding("differs", names[0], f"one tensor with {listed(names[1:])} in SRC only")
    if records_ties(matched.a):
        for names in matched.tied_in_b:
            yield Finding("differs", names[0], f"one tensor with {listed(names[1:])} here only")


def _left_out(manifest: Manifest | None) -> frozenset[str]:
    return frozenset(left.name for left in manifest.left_out) if manifest else frozenset()


def _how_far(row: Row, a: TensorSpec, b: TensorSpec) -> str:
    if row.outcome == "shape":
        return f"shape {list(b.shape)}, {list(a.shape)} in SRC"
    if row.outcome == "dtype":
        return f"{b.dtype.name}, {a.dtype.name} in SRC"
    cast = "" if a.dtype == b.dtype else f" cast to {b.dtype.name}"
    return (
        f"{row.differing_numel:,} of {b.numel:,} elements are not those of SRC{cast}: "
        f"max abs {row.max_abs:.3g}, max rel {row.max_rel:.3g}"
    )


def _notes_on_source(
    matched: Match, rows: Iterable[Row], manifest: Manifest | None
) -> Iterator[str]:
    for note in matched.a.notes:
        yield f"SRC: {note}"
    yield from matched.notes
    casts = Counter(
        (a.dtype.name, b.dtype.name)
        for a, b in matched.pairs
        if a.dtype != b.dtype and a.dtype.is_floating and b.dtype.is_floating
    )
    for (there, here), number in casts.items():
        yield f"{number} tensors compared with SRC's {there} values cast to {here}"
    left_out = _left_out(manifest)
    absent = [row.name for row in rows if row.outcome == "only in A" and row.name in left_out]
    if absent:
        yield f"left out, as the manifest says: {listed(absent)}"


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
