"""`convert`: from a ZeRO folder to what `save_consolidated` would have written, offline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from zckpt import hf, records
from zckpt.digests import Block, blocks_of, of_block, of_tensor
from zckpt.errors import (
    MissingParametersError,
    NoSpaceError,
    NotACheckpointError,
    UsageError,
)
from zckpt.manifest import Digest, LeftOut, Manifest
from zckpt.names import as_patterns, listed, matches_any
from zckpt.plan import INDEX_NAME, FilePlan, plan_files
from zckpt.ranks import alone
from zckpt.sources.cast import Cast
from zckpt.sources.consolidated import find
from zckpt.sources.zero import ZeroEntry, ZeroFolder
from zckpt.spec import DTYPES, AliasGroup, DType
from zckpt.tensors import CHUNK_BYTES, as_bytes, chunks
from zckpt.torchfile import Checksums, Record
from zckpt.writers import commit, stream

CASTS = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What `dtype=` takes, and torch's name for it."""

Patterns = str | Iterable[str]
Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did, or with `dry_run` would do."""

    source: Path
    """The tag folder that was read."""
    path: Path
    tag: str
    files: dict[str, int]
    """Files of tensors with their sizes in bytes."""
    tensors: int
    aliases: dict[str, str]
    """The owner of each alias."""
    left_out: tuple[LeftOut, ...]
    """What the module has and the files do not, and why."""
    read_bytes: int
    """Bytes read from the folder: of each record that is needed, all, for its CRC-32."""
    memory_bytes: int
    """About what all threads together hold at a time."""
    estimated_s: float
    """With `dry_run`: about how long reading and hashing will take, by a sample; else 0."""
    jobs: int
    manifest: Manifest | None = field(repr=False)
    """None with `dry_run`."""
    seconds: dict[str, float] = field(compare=False)
    """Wall seconds by phase: open, write, commit."""
    notes: tuple[str, ...]
    """What deserves a look, as sentences; in the manifest's warnings too."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of tensors together."""
        return sum(self.files.values())


def convert(
    src: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep",
    max_shard_size: int | str = "5GB",
    include: Patterns = (),
    exclude: Patterns = (),
    exclude_frozen: bool = False,
    allow_missing: Patterns = (),
    allow_global: Patterns = (),
    assets: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    digest: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a ZeRO folder into safetensors that anyone can load, with a manifest.

    Local. Needs neither deepspeed nor any class of the training code, and runs nothing of the
    folder. Equal to what `save_consolidated` would have written at the same step: with `dtype` keep
    to `weights="master"`, with the dtype of training to `weights="live"`.

    **Memory:** a few MiB a thread, however large the model and however many the ranks. Reads the
    fp32 groups and what the optimizer does not hold, never Adam's moments; every record that is
    read is compared with the CRC-32 in its file, so a record that is needed in part is read whole.

    Args:
        src: the folder of a run, or of one tag in it.
        out_dir: the folder to make. It appears complete or not at all.
        tag: which checkpoint of the run; without it the one that `latest` names, or the only one.
        dtype: `keep` for masters as they are (fp32) and other parameters as stored, else what
            floating parameters are cast to, each value rounded once. Buffers never change.
        max_shard_size: largest file, in bytes or like `"5GB"`.
        include: shell-style patterns; only names that match one are converted.
        exclude: patterns of names to leave out.
        exclude_frozen: leave out parameters that the optimizer does not hold, in the folder or not.
        allow_missing: patterns of parameters whose values may be nowhere in the folder. They are
            left out, and the manifest says so.
        allow_global: names of functions or classes whose calls the folder's pickles may mention.
            They are read past; nothing is called.
        assets: a folder whose config and tokenizer files are copied, so that `from_pretrained`
            works on `out_dir`.
        jobs: threads; by default one a core.
        digest: hash the tensors while they are written. Without it `verify` compares less.
        overwrite: replace a zckpt checkpoint at `out_dir`.
        dry_run: read the folder's directories and pickles and a sample, plan, and write nothing.
        progress: called with (bytes written so far, bytes in all).

    Raises:
        NotACheckpointError: no ZeRO folder, or several tags and nothing says which.
        CorruptCheckpointError: a file is missing, damaged, or does not belong to the others.
        UnsafePickleError: a pickle would run code.
        MissingParametersError: parameters that the module has are nowhere in the folder.
        UnsupportedError: experts, pipeline or tensor parallel.
        UsageError, TargetExistsError, NoSpaceError: bad arguments, or the target says no.

    After any error whatever `out_dir` held is as it was.
    """
    seconds: dict[str, float] = {}
    cast, target, threads = _checked(dtype, out_dir, tag, jobs)
    config = None if assets is None else _assets(assets)
    with _timed(seconds, "open"):
        checks = Checksums()
        folder = _open(src, tag, allow_global, checks)
        _refuse_missing(folder, as_patterns(allow_missing), exclude_frozen=exclude_frozen)
        entries, left_out = _chosen(
            folder, as_patterns(include), as_patterns(exclude), exclude_frozen=exclude_frozen
        )
        source = Cast(folder, [entry.spec for entry in entries], cast)
        plan = plan_files(
            source.specs, [entry.group for entry in entries], max_shard_size=max_shard_size
        )
        commit.check_target(target, overwrite=overwrite)
        _keep_inputs(target, folder.path, config)
        read_bytes = sum(record.size_bytes for record in _records(entries))
        if not dry_run:
            commit.check_space(target, plan.size_bytes)
    if dry_run:
        with _timed(seconds, "sample"):
            rate = _sample_rate(source, plan, hashes=digest)
        manifest, estimated_s = None, max(plan.size_bytes, read_bytes) / rate / threads
    else:
        with commit.staged(alone(), target, overwrite=overwrite) as staging, _one_thread_each():
            with _timed(seconds, "write"):
                warnings: tuple[str, ...] = ()
                if config is not None:
                    warnings = hf.copy_assets(config, staging.folder, plan)
                digests = _write(plan, source, checks, staging.folder, threads, digest, progress)
            with _timed(seconds, "commit"):
                manifest = records.describe_converted(
                    folder,
                    entries,
                    plan,
                    staging.folder,
                    digests=digests,
                    dtype=cast,
                    left_out=left_out,
                    overflown=source.overflown,
                    warnings=warnings,
                )
                commit.publish(staging, manifest, records.describe_run(seconds))
        estimated_s = 0.0
    return ConvertReport(
        source=folder.path,
        path=target,
        tag=folder.tag,
        files={file.name: file.size_bytes for file in plan.files},
        tensors=len(plan.tensors),
        aliases={alias: e.group.owner for e in entries for alias in e.group.aliases},
        left_out=left_out,
        read_bytes=read_bytes,
        memory_bytes=threads * _CHUNKS_HELD * CHUNK_BYTES,
        estimated_s=estimated_s,
        jobs=threads,
        manifest=manifest,
        seconds=seconds,
        notes=(
            *_said(folder, manifest),
            *_hints(folder, assets),
            *(_lacks_space(target, plan) if dry_run else ()),
        ),
    )


# ------------------------------------------------------------------ what was asked for


_CHUNKS_HELD = 3
"""What was read, what it was cast to, and what is being allocated for the next."""


def _checked(
    dtype: str, out_dir: str | os.PathLike[str], tag: str | None, jobs: int | None
) -> tuple[DType | None, Path, int]:
    if dtype not in CASTS:
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, CASTS))}.")
    target = commit.target_of(out_dir)
    if target.suffix in {".bin", ".safetensors", ".pt", ".pth"}:
        raise UsageError(
            f"out_dir={str(out_dir)!r} is the name of a file; name the folder to make, such as "
            f"{str(target.with_suffix(''))!r}. The files in it are named as Hugging Face does."
        )
    if jobs is not None and (type(jobs) is not int or not 1 <= jobs <= 1024):
        raise UsageError(f"jobs={jobs!r}: expected a number of threads from 1 to 1024.")
    if tag is not None and not isinstance(tag, str):
        raise UsageError(f"tag={tag!r}: expected the name of a folder.")
    word = CASTS[dtype]
    return None if word is None else DTYPES[word], target, jobs or len(os.sched_getaffinity(0))


def _open(
    src: str | os.PathLike[str], tag: str | None, allow_global: Patterns, checks: Checksums
) -> ZeroFolder:
    place = find(src)
    if not place.is_dir():
        raise NotACheckpointError(f"{place} is a file; name the folder of a ZeRO checkpoint.")
    allowed = frozenset(as_patterns(allow_global))
    return ZeroFolder.open(place, tag=tag, allowed=allowed, checks=checks)


def _assets(assets: str | os.PathLike[str]) -> Path:
    place = Path(assets).expanduser()
    if not (place / "config.json").is_file():
        raise UsageError(f"assets={str(assets)!r} holds no config.json; name the model's folder.")
    return place


def _keep_inputs(target: Path, *inputs: Path | None) -> None:
    """Refuse a target that holds what is read: replacing it would delete that."""
    for place in inputs:
        if place is not None and target in (place.resolve(), *place.resolve().parents):
            raise UsageError(
                f"{target} holds {place}, which is read, and would be replaced as a whole; name "
                "another folder."
            )


def _refuse_missing(folder: ZeroFolder, allowed: tuple[str, ...], *, exclude_frozen: bool) -> None:
    if exclude_frozen and not folder.files.stage:
        raise UsageError(
            f"{folder.path} is of ZeRO stage 0, whose files do not say what the optimizer holds; "
            "name what to leave out with exclude (--exclude) instead of exclude_frozen."
        )
    missing = [name for name in folder.missing if not matches_any(name, allowed)]
    if missing and not exclude_frozen:
        raise MissingParametersError(
            f"{folder.path} lacks {len(missing)} parameters of the module: {listed(missing)}. "
            f"{'It was saved with exclude_frozen_parameters. ' if folder.lacks_frozen else ''}"
            "Neither the DeepSpeed optimizer held them nor were they saved as frozen: they were "
            "trained by something else (LOMO, a second optimizer), or an old version did not save "
            "them, or they share a tensor and the record of that was lost. "
            "Save them from the live model with save_consolidated; or go on without them: "
            f"--allow-missing {missing[0]!r} (or a pattern), or --exclude-frozen, which leaves out "
            "all that the optimizer does not hold."
        )
    if folder.lacks_frozen and "*" not in allowed and not exclude_frozen:
        raise MissingParametersError(
            f"{folder.path} was saved with exclude_frozen_parameters, so its frozen parameters are "
            "not in it, not even by name. To convert the others: --exclude-frozen, or "
            "--allow-missing '*'"
        )


def _chosen(
    folder: ZeroFolder,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    *,
    exclude_frozen: bool,
) -> tuple[tuple[ZeroEntry, ...], tuple[LeftOut, ...]]:
    """Return the entries to convert, under the names that are asked for, and what is left out."""
    left_out = list(folder.left_out)
    left_out += [LeftOut(name=name, reason="not in the ZeRO folder") for name in folder.missing]
    if folder.lacks_frozen:
        reason = "saved with exclude_frozen_parameters: not in the ZeRO folder, not even by name"
        left_out.append(LeftOut(name="(frozen parameters)", reason=reason))
    chosen = []
    for entry in folder.entries:
        names = entry.group.names
        if exclude_frozen and entry.spec.role == "parameter" and entry.value_from != "master":
            left_out += [LeftOut(name=n, reason="not held by the optimizer") for n in names]
            continue
        kept = [
            name
            for name in names
            if (not include or matches_any(name, include)) and not matches_any(name, exclude)
        ]
        left_out += [LeftOut(name=n, reason="not asked for") for n in names if n not in kept]
        if kept:
            group = AliasGroup(kept[0], tuple(kept[1:]))
            chosen.append(replace(entry, group=group, spec=replace(entry.spec, name=kept[0])))
    if not chosen:
        raise UsageError(
            "no tensor is left to convert: of these names none matches include and not exclude: "
            f"{listed(folder)}."
        )
    return tuple(chosen), tuple(left_out)


def _said(folder: ZeroFolder, manifest: Manifest | None) -> tuple[str, ...]:
    """Return what deserves a look, without what the report has as `left_out`."""
    if manifest is None:
        return folder.notes
    return tuple(said for said in manifest.warnings if not said.startswith("left out: "))


def _hints(folder: ZeroFolder, assets: str | os.PathLike[str] | None) -> Iterator[str]:
    for place in (folder.path, folder.path.parent):
        if assets is None and (place / "config.json").is_file():
            yield f"{place} holds config.json; --assets {place} copies it"
            return


def _lacks_space(target: Path, plan: FilePlan) -> Iterator[str]:
    try:
        commit.check_space(target, plan.size_bytes)
    except NoSpaceError as error:
        yield str(error)


def _records(entries: Iterable[ZeroEntry]) -> Iterator[Record]:
    """Yield each record of a file from which values come, once."""
    seen = set()
    for entry in entries:
        for piece in entry.placed.placement.pieces(0, entry.spec.numel):
            file, ref = entry.placed.parts[piece.rank][piece.group]
            key = (file.path, ref.storage.key)
            if key not in seen:
                seen.add(key)
                yield file.record(ref.storage)


# ------------------------------------------------------------------ copying


def _write(
    plan: FilePlan,
    source: Cast,
    checks: Checksums,
    folder: Path,
    threads: int,
    hashes: bool,
    progress: Progress | None,
) -> dict[str, Digest | None]:
    """Write every file, check what was read, and return the digest of each tensor."""
    stream.lay_out(folder, plan.files)
    if plan.index is not None:
        (folder / INDEX_NAME).write_bytes(plan.index)
    of_blocks: dict[str, dict[int, bytes]] = {name: {} for name in plan.tensors}
    total = sum(tensor.spec.size_bytes for tensor in plan.tensors.values())
    done = 0
    writer = stream.Writer(folder)

    def copy(block: Block) -> None:
        nonlocal done
        found = writer.write(plan.tensors[block.name], block, source, hashes=hashes)
        with lock:
            of_blocks[block.name][block.index] = found
            done += block.size_bytes
            if progress is not None:
                progress(done, total)

    lock = threading.Lock()
    blocks = (b for tensor in plan.tensors.values() for b in blocks_of(tensor.spec))
    _in_threads(copy, blocks, threads)
    writer.sync()
    _in_threads(lambda part: checks.read_rest(*part), list(checks.unread()), threads)
    checks.verify()
    return {
        name: of_tensor([found[index] for index in range(len(found))]) if hashes else None
        for name, found in of_blocks.items()
    }


def _in_threads(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call `work` for each item. Items are taken one by one, in order; an error stops all."""
    waiting = iter(items)
    taking = threading.Lock()
    is_over = threading.Event()
    nothing = object()

    def loop() -> None:
        while not is_over.is_set():
            with taking:
                item = next(waiting, nothing)
            if item is nothing:
                return
            work(item)  # type: ignore[arg-type]

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(loop) for _ in range(threads)]
        try:
            for finished in as_completed(running):
                finished.result()
        finally:
            is_over.set()


_casting = threading.Lock()
_conversions: list[int] = []
"""torch's number of threads before each conversion that goes on now."""


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have torch cast in the calling thread: ours are as many as there are cores already.

    The setting is the process's. The first of several conversions changes it, the last one puts it
    back.
    """
    with _casting:
        _conversions.append(_conversions[0] if _conversions else torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _casting:
            before = _conversions.pop()
            if not _conversions:
                torch.set_num_threads(before)


_SAMPLE_BYTES = 64 << 20


def _sample_rate(source: Cast, plan: FilePlan, *, hashes: bool) -> float:
    """Return how many bytes a second one thread reads, casts and hashes, by the first 64 MiB."""
    begin = time.perf_counter()
    done = 0
    for tensor in plan.tensors.values():
        for block in blocks_of(tensor.spec):
            for start, end in chunks(block.start, block.end, tensor.spec.dtype.size_bytes):
                data = as_bytes(source.read(block.name, start, end))
                if hashes:
                    of_block([data])
                done += len(data)
            if done >= _SAMPLE_BYTES:
                return done / (time.perf_counter() - begin)
    return max(done, 1) / (time.perf_counter() - begin)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = time.perf_counter() - begin
