"""`save_consolidated`: from a live model to a folder of safetensors that proves itself."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zckpt import hf, records
from zckpt.digests import BLOCK_BYTES, Block, blocks_of, of_tensor
from zckpt.errors import StaleCopiesError, UsageError
from zckpt.evaluation import EvalFn, check_can_evaluate, evaluate
from zckpt.live import LiveModel, look_at
from zckpt.manifest import Digest, Manifest
from zckpt.plan import INDEX_NAME, SavePlan, make_plan
from zckpt.ranks import Team, assemble
from zckpt.sources.engine import LiveSource, Weights
from zckpt.spec import DTYPES, DType
from zckpt.writers import commit, stream

logger = logging.getLogger("zckpt")

CASTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What `dtype=` takes, and torch's name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did. The same on every rank, but for `seconds`."""

    path: Path
    manifest: Manifest = field(repr=False)
    seconds: dict[str, float] = field(compare=False)
    """Wall seconds that this rank spent, by phase: plan, write, evaluate, commit."""
    buckets: int
    """In how many windows the tensors were handled."""
    writer_ranks: int
    """How many ranks wrote tensors; 1 where the folder is not shared by all."""
    removed: tuple[Path, ...]
    """Older checkpoints that `save_total_limit` deleted."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all these files together."""
        return sum(file.size_bytes for file in self.manifest.files)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file of the checkpoint but the manifest and the run record."""
        return tuple(self.path / file.name for file in self.manifest.files)

    @property
    def stale_copies(self) -> tuple[str, ...]:
        """Names whose gathered copies disagreed with their partitions."""
        return self.manifest.stale_copies

    @property
    def aliases(self) -> dict[str, str]:
        """The owner of each alias."""
        return {alias: group.owner for group in self.manifest.aliases for alias in group.aliases}

    @property
    def warnings(self) -> tuple[str, ...]:
        """All that deserves a look, as sentences."""
        return self.manifest.warnings


def save_consolidated(
    engine: Any,
    out_dir: str | os.PathLike[str],
    *,
    weights: Weights = "live",
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    eval_fn: EvalFn | None = None,
    stale: Literal["report", "error"] = "report",
    tokenizer: hf.SavesPretrained | None = None,
    max_shard_size: int | str = "5GB",
    bucket_bytes: int = 512 << 20,
    overwrite: bool = False,
    save_total_limit: int | None = None,
    pinned: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    timeout_s: float = 60.0,
) -> SaveReport:
    """Save a live model as safetensors that anyone can load, with a manifest that proves it.

    **Collective:** call it on every rank, between any two calls of the training loop. Training goes
    on afterwards bit for bit as if nothing had been saved.

    **Memory:** on each rank one bucket beyond the engine, or the largest tensor where that is
    bigger (twice that tensor with gloo, which copies what it gathers); 1 MiB where nothing is
    partitioned.

    Args:
        engine: a DeepSpeed engine of any ZeRO stage, with or without an optimizer, a module made
            under `zero.Init`, or a plain `nn.Module`.
        out_dir: the folder to make. It appears complete or not at all.
        weights: `live` saves what the module computes with, `master` the optimizer's fp32 copies
            where there are any (live values elsewhere).
        dtype: cast floating parameters, rounding each once. Buffers keep their dtype.
        eval_fn: called with the module on every rank, in eval mode, without gradients, on the
            weights that are saved. Its value goes to the manifest; modes, buffers, random states
            and gathered copies are put back afterwards.
        stale: what to do about gathered copies that disagree with their partitions (a fused
            optimizer leaves such): `report` saves the partitions and says so, `error` refuses.
        tokenizer: a tokenizer or processor whose files go into the folder.
        max_shard_size: largest file, in bytes or like `"5GB"`.
        bucket_bytes: most bytes gathered at a time, at least one tensor. Not more than 16 MiB a
            rank are used: that keeps all ranks busy.
        overwrite: replace a zckpt checkpoint at `out_dir`, the whole folder; the old one stays
            until the new one is complete.
        save_total_limit: with `out_dir` named `checkpoint-<step>`: how many of these to keep beside
            each other, counting this one. The lowest steps go first, after the commit.
        pinned: a checkpoint, or several, that `save_total_limit` never deletes.
        timeout_s: how long to wait for ranks that have not made the call, in seconds.

    Returns:
        The report, on every rank.

    Raises:
        UsageError, UnsupportedError, NameCollisionError, LayoutError: bad arguments, or a model
            that cannot be saved right.
        TargetExistsError, NoSpaceError: the folder or the disk says no.
        StaleCopiesError: with `stale="error"`.
        AbsentRanksError: some ranks never made the call.
        RankError: another rank failed or died.

    After any error whatever `out_dir` held is as it was; only an error while older checkpoints are
    deleted comes after the commit, and says so.
    """
    options = _Options(
        target=commit.target_of(out_dir),
        weights=weights,
        dtype=dtype,
        stale=stale,
        max_shard_size=max_shard_size,
        bucket_bytes=bucket_bytes,
        overwrite=overwrite,
        save_total_limit=save_total_limit,
        evaluates=eval_fn is not None,
    )
    clock = _Clock()
    team = assemble("save_consolidated", repr(options), timeout_s)
    with clock("plan"), team.together("looking at the model"):
        options.check()
        kept = _paths(pinned)
        live = look_at(engine)
        if eval_fn is not None:
            check_can_evaluate(live, eval_fn)
        source = LiveSource(live, team, weights=weights, cast=options.cast)
    with commit.staged(team, options.target, overwrite=overwrite) as staging:
        with clock("plan"):
            differing = source.compare_ranks()
            plan = _plan(team, live, source, differing, staging, options, tokenizer)
        with clock("write"):
            digests = _write(team, source, plan, staging.folder)
            stale_copies, overflown = source.stale_copies, source.overflown
        if stale_copies and stale == "error":
            raise StaleCopiesError(f"{records.stale_warning(stale_copies)} Nothing was saved.")
        evaluation = None
        if eval_fn is not None:
            with clock("evaluate"):
                evaluation = evaluate(
                    live,
                    team,
                    eval_fn,
                    stale_copies=stale_copies,
                    is_of_saved_values=options.is_exact,
                )
        with clock("commit"):
            manifest = None
            with team.together("committing"):
                if team.rank == 0:
                    manifest = records.describe(
                        live,
                        source,
                        plan,
                        staging.folder,
                        digests=digests,
                        world_size=team.size,
                        dtype=options.cast,
                        stale_copies=stale_copies,
                        differing=differing,
                        overflown=overflown,
                        evaluation=evaluation,
                    )
                    run = records.describe_run(clock.seconds)
                    commit.publish(staging, manifest, run)
            manifest = team.broadcast(manifest)
    assert manifest is not None
    removed = _rotate(team, options, kept)
    report = SaveReport(
        path=options.target,
        manifest=manifest,
        seconds=clock.seconds,
        buckets=len(plan.buckets),
        writer_ranks=len({r for shares in plan.shares for r, mine in enumerate(shares) if mine}),
        removed=removed,
    )
    if team.rank == 0:
        for warning in report.warnings:
            logger.warning("%s: %s", options.target.name, warning)
    return report


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The arguments that have to be the same on every rank."""

    target: Path
    weights: Weights
    dtype: str | None
    stale: str
    max_shard_size: int | str
    bucket_bytes: int
    overwrite: bool
    save_total_limit: int | None
    evaluates: bool

    @property
    def cast(self) -> DType | None:
        return None if self.dtype is None else DTYPES[CASTS[self.dtype]]

    @property
    def is_exact(self) -> bool:
        """Whether the saved values are the very ones the module computes with."""
        return self.weights == "live" and self.dtype is None

    def check(self) -> None:
        for name, value, allowed in (
            ("weights", self.weights, ("live", "master")),
            ("dtype", self.dtype, (None, *CASTS)),
            ("stale", self.stale, ("report", "error")),
        ):
            if value not in allowed:
                raise UsageError(
                    f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}."
                )
        for name, number in (
            ("bucket_bytes", self.bucket_bytes),
            ("save_total_limit", self.save_total_limit),
        ):
            if number is not None and not isinstance(number, int):
                raise UsageError(f"{name}={number!r}: expected a whole number.")
        if not isinstance(self.overwrite, bool):
            raise UsageError(f"overwrite={self.overwrite!r}: expected True or False.")
        if self.save_total_limit is None:
            return
        if self.save_total_limit < 1:
            raise UsageError(f"save_total_limit={self.save_total_limit}: expected at least 1.")
        if commit.checkpoint_step(self.target) is None:
            raise UsageError(
                "save_total_limit needs a folder named checkpoint-<step>, got "
                f"{self.target.name!r}."
            )


def _plan(
    team: Team,
    live: LiveModel,
    source: LiveSource,
    differing: frozenset[str],
    staging: commit.Staging,
    options: _Options,
    tokenizer: hf.SavesPretrained | None,
) -> SavePlan:
    """Decide where everything goes and create all files, those of tensors still without values."""
    with team.together("laying out the files"):
        plan = make_plan(
            source.specs,
            [entry.group for entry in live.entries],
            max_shard_size=options.max_shard_size,
            # A block for each rank keeps all of them busy; more would only take fresh memory, which
            # costs more time than the gather itself where it has to be cleared first (on a CPU).
            bucket_bytes=min(options.bucket_bytes, team.size * BLOCK_BYTES),
            window_bytes={spec.name: source.window_bytes(spec.name) for spec in source.specs},
            writer_ranks=team.size if staging.is_shared else 1,
            rank_0_only=differing,
        )
        if team.rank == 0:
            commit.check_space(options.target, plan.size_bytes)
            hf.write_assets(live, staging.folder, plan.main_dtype, tokenizer)
            stream.lay_out(staging.folder, plan.files)
            if plan.index is not None:
                (staging.folder / INDEX_NAME).write_bytes(plan.index)
    return plan


def _write(team: Team, source: LiveSource, plan: SavePlan, folder: Path) -> dict[str, Digest]:
    """Write every block, each rank its share of each bucket; return all tensors' digests."""
    mine: dict[Block, bytes] = {}
    writer = stream.Writer(folder)
    for bucket, shares in zip(plan.buckets, plan.shares, strict=True):
        with source.window(bucket), team.together(f"writing {bucket[0]} and what follows it"):
            for block in shares[team.rank] if team.rank < len(shares) else ():
                mine[block] = writer.write(plan.tensors[block.name], block, source)
    with team.together("syncing its files to the disk"):
        writer.sync()
    everyone = {block: digest for part in team.gather(mine) for block, digest in part.items()}
    return {
        name: of_tensor([everyone[block] for block in blocks_of(tensor.spec)])
        for name, tensor in plan.tensors.items()
    }


def _rotate(team: Team, options: _Options, pinned: Iterable[Path]) -> tuple[Path, ...]:
    """Delete what `save_total_limit` leaves no room for, and return it, on every rank."""
    removed: tuple[Path, ...] = ()
    if options.save_total_limit is not None:
        with team.together("deleting old checkpoints, after the commit"):
            if team.rank == 0:
                removed = commit.rotate(options.target, options.save_total_limit, pinned)
        removed = team.broadcast(removed)
    return removed


def _paths(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    return [Path(path).expanduser() for path in several]


class _Clock:
    """Adds up wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
