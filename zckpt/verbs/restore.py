"""`load_consolidated`: from a folder of safetensors into a live model of any kind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zckpt.digests import Block, blocks_of, of_tensor
from zckpt.errors import SpecMismatchError
from zckpt.live import Entry, LiveModel, look_at
from zckpt.manifest import Manifest
from zckpt.names import as_patterns, listed, matches_any, reconcile_prefix
from zckpt.plan import deal
from zckpt.ranks import Team, alone, assemble
from zckpt.sources.consolidated import Consolidated
from zckpt.sources.consolidated import open as open_checkpoint
from zckpt.targets import model as target_model
from zckpt.tensors import digest_of_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did on this rank."""

    loaded: tuple[str, ...] = field(repr=False)
    """Names of the target that now hold the checkpoint's values, aliases included."""
    missing: tuple[str, ...]
    """Names of the target that the checkpoint lacks, as `allow_missing` permitted."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the target lacks, as `allow_unexpected` permitted."""
    retied: dict[str, str] = field(repr=False)
    """Names that the target ties, each with the stored tensor they share."""
    expanded: tuple[str, ...] = field(repr=False)
    """Names that the checkpoint ties and the target does not: both sides were filled."""
    cast: tuple[str, ...] = field(repr=False)
    """Names whose stored dtype is not the target's."""
    differing_buffers: tuple[str, ...]
    """Non-persistent buffers that are not what they were when the checkpoint was saved, with how
    they differ. They are in no checkpoint, and can make a loss differ where all weights agree."""
    left_on_meta: tuple[str, ...]
    """Tensors of a meta target that no checkpoint fills: non-persistent buffers, permitted
    missing names. They still have to be computed."""
    digests_checked: bool
    manifest: Manifest | None = field(repr=False)
    seconds: float = field(compare=False)


def load_consolidated(
    target: Any,
    path: str | os.PathLike[str],
    *,
    check: bool = True,
    allow_missing: str | Iterable[str] = (),
    allow_unexpected: str | Iterable[str] = (),
    allow_cast: bool = False,
    timeout_s: float = 60.0,
) -> LoadReport:
    """Load a consolidated checkpoint into a live model and return what was done.

    **Collective** for an engine and for a module with ZeRO-3 partitions: call it on every rank.
    Local for every other module. Every calling rank has to see the path.

    Names, shapes, dtypes and (with `check`) digests are compared first: after an error of those the
    target is as it was. Each rank then reads the ranges it holds: partitions, gathered copies, fp32
    masters, buffers. The optimizer's moments stay as they are.

    **Memory:** 1 MiB a rank beyond the target.

    Args:
        target: a plain or Hugging Face module (also on the meta device: it is given memory on the
            CPU), a module under `zero.Init`, or a DeepSpeed engine of any stage and world size.
        path: a folder that zckpt wrote, any Hugging Face safetensors folder, or one such file.
        check: compare every tensor with its digest in the manifest, where there is one; the ranks
            share the work. Reads the files once more.
        allow_missing: a pattern (`*` matches anything), or several, of target names that may be
            missing.
        allow_unexpected: the same of checkpoint names that the target need not have.
        allow_cast: accept floating tensors of another floating dtype, rounding once. Parameters
            with an fp32 master need no permission: the master takes the stored value.
        timeout_s: how long to wait for ranks that have not made the call, in seconds.

    Raises:
        NotACheckpointError, CorruptCheckpointError: the path holds nothing readable.
        SpecMismatchError: names, shapes or dtypes differ, or there is no name in common.
        UnsupportedError, LayoutError: a target that cannot be filled right.
        AbsentRanksError, RankError: other ranks did not call, failed or died.
    """
    start = time.perf_counter()
    live = look_at(target)
    team = alone()
    if live.kind != "module":
        team = assemble("load_consolidated", f"{os.fspath(path)!r}, {check=}", timeout_s)
    with team.together("comparing names, shapes and dtypes"):
        checkpoint = open_checkpoint(path)
        target_model.check_fillable(live)
        match = _match(
            checkpoint, live, as_patterns(allow_missing), as_patterns(allow_unexpected), allow_cast
        )
    if check:
        _check_digests(checkpoint, sorted(set(match.stored.values())), team)
    left_on_meta: list[str] = []
    with team.together("filling the target"):
        if live.kind == "module":
            filled = {id(e.tensor) for e in live.entries if e.name in match.stored}
            left_on_meta = target_model.materialize(live.module, filled)
            live = look_at(live.module)
        target_model.settle(live)
        for entry in live.entries:
            stored = match.stored.get(entry.name)
            if stored is not None:
                target_model.fill(live, entry, _reader(checkpoint, stored))
    return LoadReport(
        loaded=match.loaded,
        missing=match.missing,
        unexpected=match.unexpected,
        retied=match.retied,
        expanded=match.expanded,
        cast=match.cast,
        differing_buffers=tuple(_differing_buffers(live, checkpoint.manifest)),
        left_on_meta=tuple(left_on_meta),
        digests_checked=check and checkpoint.manifest is not None,
        manifest=checkpoint.manifest,
        seconds=time.perf_counter() - start,
    )


def _reader(checkpoint: Consolidated, stored: str) -> target_model.Read:
    def read(start: int, end: int) -> Tensor:
        return checkpoint.read(stored, start, end)

    return read


def _check_digests(checkpoint: Consolidated, names: Sequence[str], team: Team) -> None:
    """Check every tensor once, each rank hashing its share of the blocks."""
    if checkpoint.manifest is None:
        return
    mine: dict[Block, bytes] = {}
    with team.together("checking digests"):
        (shares,) = deal([[checkpoint.spec(name) for name in names]], team.size)
        mine = {block: checkpoint.digest_block(block) for block in shares[team.rank]}
    everyone = {block: digest for part in team.gather(mine) for block, digest in part.items()}
    with team.together("checking digests"):
        for name in names:
            blocks = [everyone[block] for block in blocks_of(checkpoint.spec(name))]
            checkpoint.check(name, of_tensor(blocks))


# ------------------------------------------------------------------ matching

_RENAMED = (
    " Some transformers models are stored under other names than state_dict() has: load a folder "
    "that save_pretrained wrote with the class's from_pretrained."
)


@dataclass(frozen=True, kw_only=True)
class _Match:
    """Which stored tensor fills which entry of the target."""

    stored: Mapping[str, str]
    """Entry name to stored name."""
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    retied: dict[str, str] = field(repr=False)
    expanded: tuple[str, ...] = field(repr=False)
    cast: tuple[str, ...]


def _match(
    checkpoint: Consolidated,
    live: LiveModel,
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    allow_cast: bool,
) -> _Match:
    target_names = {name for entry in live.entries for name in entry.group.names}
    remove, add = reconcile_prefix(checkpoint, target_names)
    owner_of = {add + name.removeprefix(remove): checkpoint.owner(name) for name in checkpoint}
    if not target_names & owner_of.keys():
        raise SpecMismatchError(
            f"{checkpoint.path} and the target have no name in common: the checkpoint has "
            f"{listed(sorted(owner_of), 3)}; the target has {listed(sorted(target_names), 3)}."
        )
    stored: dict[str, str] = {}
    missing: list[str] = []
    problems: list[str] = []
    for entry in live.entries:
        owners = sorted({owner_of[name] for name in entry.group.names if name in owner_of})
        if not owners:
            missing += entry.group.names
            continue
        if len(owners) > 1 and not _all_equal(checkpoint, owners):
            problems.append(
                f"the target ties {listed(entry.group.names)}, the checkpoint holds different "
                f"tensors for them ({listed(owners)}); untie the target"
            )
        stored[entry.name] = owners[0]
        problems += _differences(checkpoint, live, entry, owners[0], allow_cast)
    unexpected = [name for name in owner_of if name not in target_names]
    problems += [
        f"missing from the checkpoint: {name}"
        for name in missing
        if not matches_any(name, allow_missing)
    ]
    problems += [
        f"not in the target: {name}"
        for name in unexpected
        if not matches_any(name, allow_unexpected)
    ]
    if problems:
        raise SpecMismatchError(
            f"{checkpoint.path} does not fit the target ({len(problems)} differences): "
            f"{'; '.join(problems[:20])}{'; ...' if len(problems) > 20 else ''}. Names can be "
            "permitted with allow_missing= and allow_unexpected=, dtypes with allow_cast=True."
            f"{'' if checkpoint.manifest else _RENAMED}"
        )
    used = list(stored.values())
    return _Match(
        stored=stored,
        loaded=tuple(n for e in live.entries if e.name in stored for n in e.group.names),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        retied={
            a: stored[e.name] for e in live.entries if e.name in stored for a in e.group.aliases
        },
        expanded=tuple(name for name, owner in stored.items() if used.count(owner) > 1),
        cast=tuple(
            entry.name
            for entry in live.entries
            if entry.name in stored
            and checkpoint.spec(stored[entry.name]).dtype != entry.spec.dtype
        ),
    )


def _differences(
    checkpoint: Consolidated, live: LiveModel, entry: Entry, stored: str, allow_cast: bool
) -> list[str]:
    ours, theirs = entry.spec, checkpoint.spec(stored)
    if ours.shape != theirs.shape:
        return [f"{entry.name}: shape {list(ours.shape)}, stored {list(theirs.shape)}"]
    castable = ours.dtype.is_floating and theirs.dtype.is_floating
    permitted = allow_cast or id(entry.tensor) in live.masters or not ours.numel
    if ours.dtype != theirs.dtype and not (castable and permitted):
        return [f"{entry.name}: {ours.dtype.name}, stored {theirs.dtype.name}"]
    return []


def _all_equal(checkpoint: Consolidated, names: Sequence[str]) -> bool:
    if len({(checkpoint.spec(n).shape, checkpoint.spec(n).dtype) for n in names}) > 1:
        return False
    return len({checkpoint.digest(name).hex for name in names}) == 1


def _differing_buffers(live: LiveModel, manifest: Manifest | None) -> Iterable[str]:
    """Yield how each non-persistent buffer differs from what it was at the save."""
    for record in manifest.unstored_buffers if manifest else ():
        buffer = live.unstored_buffers.get(record.name)
        if buffer is None or buffer.is_meta or record.digest is None:
            continue
        dtype = str(buffer.dtype).removeprefix("torch.")
        if dtype != record.dtype:
            yield f"{record.name}: {dtype} now, {record.dtype} when saved"
        elif tuple(buffer.shape) != record.shape:
            yield f"{record.name}: shape {list(buffer.shape)} now, {list(record.shape)} when saved"
        elif digest_of_tensor(buffer) != record.digest:
            yield f"{record.name}: other values than when saved"
