"""What the manifest says about a live model: where values come from and what deserves a look."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from zckpt import __version__
from zckpt.digests import of_file, of_header
from zckpt.hf import UNTIED, config_of, ties_of
from zckpt.live import LiveModel, class_name
from zckpt.manifest import (
    SCHEMA_VERSION,
    AliasRecord,
    Digest,
    EvalRecord,
    FileRecord,
    LeftOut,
    Manifest,
    Provenance,
    RunRecord,
    TensorRecord,
    TieRecord,
    UnstoredBuffer,
    ValueFrom,
)
from zckpt.names import listed
from zckpt.plan import FilePlan, PlannedTensor, SavePlan
from zckpt.sources.engine import LiveSource, Weights
from zckpt.sources.zero import ZeroEntry, ZeroFolder
from zckpt.spec import DType
from zckpt.tensors import can_be_stored, digest_of_tensor


def describe(
    live: LiveModel,
    source: LiveSource,
    plan: SavePlan,
    folder: Path,
    *,
    digests: Mapping[str, Digest],
    world_size: int,
    dtype: DType | None,
    stale_copies: tuple[str, ...],
    differing: Iterable[str],
    overflown: Sequence[str],
    evaluation: EvalRecord | None,
) -> Manifest:
    """Return the manifest of a folder that holds everything but the manifest. Local.

    Args:
        live: the model that was saved.
        source: the source it was read through.
        plan: where everything went.
        folder: the finished folder.
        digests: the digest of each stored tensor, by owner.
        world_size: ranks that made the save.
        dtype: what floating parameters were cast to.
        stale_copies: names of gathered copies that disagreed with their partitions.
        differing: names of replicated tensors that were not the same on every rank.
        overflown: names of tensors with values that no longer fit after the cast.
        evaluation: what `eval_fn` said.
    """
    ties = ties_of(live)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        zckpt_version=__version__,
        provenance=_provenance(live, world_size, source.weights, dtype),
        files=_file_records(folder, plan),
        tensors=_tensor_records(live, plan, digests, source.weights),
        aliases=_alias_records(live),
        unstored_buffers=_unstored_buffers(live),
        left_out=live.left_out,
        stale_copies=stale_copies,
        ties=ties,
        evaluation=evaluation,
        warnings=_warnings(live, plan, stale_copies, sorted(differing), overflown, ties),
    )


def describe_converted(
    zero: ZeroFolder,
    entries: Sequence[ZeroEntry],
    plan: FilePlan,
    folder: Path,
    *,
    digests: Mapping[str, Digest | None],
    dtype: DType | None,
    left_out: tuple[LeftOut, ...],
    overflown: Sequence[str],
    warnings: Sequence[str],
) -> Manifest:
    """Return the manifest of a folder that was converted and holds everything but the manifest.

    Args:
        zero: the checkpoint that was converted.
        entries: what of it was, by the names in the files.
        plan: where everything went.
        folder: the finished folder.
        digests: the digest of each stored tensor, by owner.
        dtype: what floating parameters were cast to.
        left_out: what was not converted, and why.
        overflown: names of tensors with values that no longer fit after the cast.
        warnings: what else deserves a look.
    """
    stored = {entry.group.owner for entry in entries}
    differing = [name for name in zero.differing if name in stored]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        zckpt_version=__version__,
        provenance=Provenance(
            source="ZeRO folder",
            engine=None,
            zero_stage=zero.files.stage,
            world_size=zero.files.world_size,
            deepspeed_version=zero.deepspeed_version,
            torch_version=str(torch.__version__),
            model=None,
            optimizer=None,
            global_step=zero.global_step,
            weights="master" if any(e.value_from == "master" for e in entries) else "live",
            dtype=None if dtype is None else dtype.name,
            view="raw",
            removed_prefix=zero.removed_prefix,
            tag=zero.tag,
        ),
        files=_file_records(folder, plan),
        tensors=tuple(
            _tensor_record(
                plan.tensors[entry.group.owner],
                digests[entry.group.owner],
                trainable=entry.value_from in {"master", "unowned"},
                value_from=entry.value_from,
                optimizer=None,
            )
            for entry in entries
        ),
        aliases=tuple(
            AliasRecord(owner=entry.group.owner, aliases=entry.group.aliases)
            for entry in entries
            if entry.group.aliases
        ),
        unstored_buffers=(),
        left_out=left_out,
        stale_copies=(),
        ties=None,
        evaluation=None,
        warnings=(
            *(f"left out: {left.name} ({left.reason})" for left in left_out),
            *zero.notes,
            *_value_warnings(differing, overflown),
            *warnings,
            *_prefix_warning(zero.removed_prefix),
        ),
    )


def describe_run(seconds: Mapping[str, float]) -> RunRecord:
    """Return when, where and how fast a checkpoint is being made."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rounded = {phase: round(value, 3) for phase, value in seconds.items()}
    return RunRecord(saved_at=now, host=socket.gethostname(), seconds=rounded)


def _provenance(
    live: LiveModel, world_size: int, weights: Weights, dtype: DType | None
) -> Provenance:
    model = type(getattr(live.module, "_orig_mod", live.module))
    return Provenance(
        source=live.kind,
        engine=None if live.engine is None else type(live.engine).__name__,
        zero_stage=live.zero_stage,
        world_size=world_size,
        deepspeed_version=None if live.kind == "module" else metadata.version("deepspeed"),
        torch_version=str(torch.__version__),
        model=f"{model.__module__}.{model.__qualname__}",
        optimizer=live.optimizer_name,
        global_step=None if live.engine is None else int(live.engine.global_steps),
        weights=weights,
        dtype=None if dtype is None else dtype.name,
        view="raw",
        removed_prefix=live.removed_prefix,
    )


def _tensor_records(
    live: LiveModel,
    plan: SavePlan,
    digests: Mapping[str, Digest],
    weights: Weights,
) -> tuple[TensorRecord, ...]:
    return tuple(
        _tensor_record(
            plan.tensors[entry.name],
            digests[entry.name],
            trainable=entry.role == "parameter" and entry.tensor.requires_grad,
            value_from=live.value_from(entry, weights),
            optimizer=live.optimizer_name if id(entry.tensor) in live.owned else None,
        )
        for entry in live.entries
    )


def _tensor_record(
    planned: PlannedTensor,
    digest: Digest | None,
    *,
    trainable: bool,
    value_from: ValueFrom,
    optimizer: str | None,
) -> TensorRecord:
    return TensorRecord(
        name=planned.spec.name,
        role=planned.spec.role,
        shape=planned.spec.shape,
        dtype=planned.spec.dtype.name,
        file=planned.file,
        start=planned.span.start,
        end=planned.span.end,
        digest=digest,
        trainable=trainable,
        value_from=value_from,
        optimizer=optimizer,
    )


def _alias_records(live: LiveModel) -> tuple[AliasRecord, ...]:
    return tuple(
        AliasRecord(owner=entry.group.owner, aliases=entry.group.aliases)
        for entry in live.entries
        if entry.group.aliases
    )


def _unstored_buffers(live: LiveModel) -> tuple[UnstoredBuffer, ...]:
    return tuple(
        UnstoredBuffer(
            name=name,
            shape=tuple(buffer.shape),
            dtype=str(buffer.dtype).removeprefix("torch."),
            digest=digest_of_tensor(buffer) if can_be_stored(buffer) else None,
        )
        for name, buffer in live.unstored_buffers.items()
    )


def _file_records(folder: Path, plan: FilePlan) -> tuple[FileRecord, ...]:
    headers = {file.name: file.header for file in plan.files}
    records = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        header = headers.get(name)
        digest = of_file(path.read_bytes()) if header is None else of_header(header)
        records.append(FileRecord(name=name, size_bytes=path.stat().st_size, digest=digest))
    return tuple(records)


def _warnings(
    live: LiveModel,
    plan: SavePlan,
    stale_copies: Sequence[str],
    differing: Sequence[str],
    overflown: Sequence[str],
    ties: TieRecord | None,
) -> tuple[str, ...]:
    found = [f"left out: {left.name} ({left.reason})" for left in live.left_out]
    if stale_copies:
        found.append(stale_warning(stale_copies))
    found += _value_warnings(differing, overflown)
    dtypes = {
        tensor.spec.dtype.name
        for tensor in plan.tensors.values()
        if tensor.spec.role == "parameter" and tensor.spec.dtype.is_floating
    }
    if len(dtypes) > 1 and config_of(live.module) is not None:
        found.append(
            f"parameters are stored in {' and '.join(sorted(dtypes))}; from_pretrained makes all "
            "of them one dtype unless it is told otherwise."
        )
    if config_of(live.module) is None and hasattr(live.module, "config"):
        found.append(
            f"no config.json was written: {class_name(live.module)} is no transformers model by "
            "itself, so from_pretrained would not find its names."
        )
    if ties is not None and ties.declared and not ties.actual:
        found.append(UNTIED)
    if ties is not None and ties.actual and not ties.declared:
        found.append(
            "the word embeddings are one tensor although the config does not tie them; it was "
            "saved once, and a model built from the config will hold two."
        )
    found += _prefix_warning(live.removed_prefix)
    return tuple(found)


def _value_warnings(differing: Sequence[str], overflown: Sequence[str]) -> Iterator[str]:
    if differing:
        yield f"not the same on every rank, so rank 0's values were saved: {listed(differing)}."
    if overflown:
        yield f"values became infinite in fp16: {listed(overflown)}."


def _prefix_warning(removed_prefix: str) -> Iterator[str]:
    if removed_prefix:
        yield f"every name began with {removed_prefix!r}, which was taken off."


def stale_warning(stale_copies: Sequence[str]) -> str:
    """Return the sentence about gathered copies that are not what was trained."""
    return (
        f"{len(stale_copies)} gathered copies disagreed with their partitions: "
        f"{listed(stale_copies)}. The partitions are what was trained; the model computes with the "
        "copies until zckpt.resync(engine) refreshes them."
    )
