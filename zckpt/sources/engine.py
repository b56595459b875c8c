"""Read a live model: gathered bucket by bucket, always from the partitions, leaving no trace.

A parameter that is gathered already (persistent, kept for reuse, or left so by a fused optimizer)
is set aside first, so that the gather reads the partitions. The copy that was set aside is compared
with what was gathered and put back as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zckpt.errors import UnsupportedError
from zckpt.live import Entry, LiveModel
from zckpt.names import listed
from zckpt.plan import fill_buckets
from zckpt.ranks import Team, peers_alive
from zckpt.spec import DTYPES, DType, TensorSpec
from zckpt.tensors import CHUNK_BYTES, digest_of_tensor, same_bits, torch_dtype
from zckpt.zero import Master, gathered_copy, set_aside

Weights = Literal["live", "master"]

_GATHER_BYTES = 32 << 20
"""Most bytes that one collective call gathers, at least one parameter. gloo copies what it gathers,
so this bounds what a window takes beyond its tensors; twice as fast here as whole buckets."""


class LiveSource:
    """The tensors of a live model, as they are to be saved.

    **Collective:** `compare_ranks`, `window`, `stale_copies` and `overflown` have to be called on
    every rank of the team, in the same order. The constructor, `value` and `read` are local.
    """

    def __init__(
        self, live: LiveModel, team: Team, *, weights: Weights = "live", cast: DType | None = None
    ) -> None:
        """Look at the model; nothing is gathered or sent.

        Args:
            live: the model.
            team: the ranks that hold it.
            weights: `live` for the module's values, `master` for the optimizer's fp32 copies.
            cast: dtype for floating parameters; buffers keep their own.

        Raises:
            UnsupportedError: a tensor that cannot be stored, by name.
        """
        self._live = live
        self._team = team
        self.weights: Weights = weights
        self._cast = cast
        self._entries = {entry.name: entry for entry in live.entries}
        self._refuse_meta()
        self.specs: tuple[TensorSpec, ...] = tuple(self._spec(e) for e in live.entries)
        self._specs = {spec.name: spec for spec in self.specs}
        self._values: dict[str, Tensor] = {}
        self._stale: set[str] = set()
        self._overflown: set[str] = set()

    def window_bytes(self, name: str) -> int:
        """Bytes that a window over this tensor takes beyond the engine, on each rank."""
        entry = self._entries[name]
        if self._master(entry) is not None:
            return entry.spec.numel * 4
        return (
            entry.spec.size_bytes
            if entry.is_partitioned
            else min(entry.spec.size_bytes, CHUNK_BYTES)
        )

    @contextlib.contextmanager
    def window(self, names: Sequence[str]) -> Iterator[None]:
        """Hold the values of these tensors on every rank inside the block.

        **Collective.** Inside the block every rank may `read` any of them. Memory: the sum of their
        `window_bytes`, freed at the end.
        """
        entries = [self._entries[name] for name in names]
        masters = [entry for entry in entries if self._master(entry) is not None]
        others = [entry for entry in entries if self._master(entry) is None]
        to_check = [e for e in masters if e.is_partitioned and self._is_gathered_somewhere(e)]
        if to_check:
            with self._gathered(to_check):
                pass
        try:
            with self._gathered([entry for entry in others if entry.is_partitioned]):
                for entry in others:
                    self._values[entry.name] = entry.tensor.detach().reshape(-1)
                for entry in masters:
                    self._values[entry.name] = self._gather_master(entry)
                yield
        finally:
            self._values.clear()

    def value(self, name: str) -> Tensor:
        """Return the whole flattened value inside its window; never write to it. Local."""
        return self._values[name]

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` as stored: 1-D, contiguous, on the CPU, cast if asked.

        Local. The tensor may share memory with the model: read it at once, never write to it.
        """
        part = self._values[name][start:end]
        stored = part.to(device="cpu", dtype=torch_dtype(self._specs[name].dtype)).contiguous()
        is_narrowed = stored.dtype == torch.float16 != part.dtype
        if is_narrowed and torch.isinf(stored).sum() > torch.isinf(part).sum():
            self._overflown.add(name)
        return stored

    @property
    def stale_copies(self) -> tuple[str, ...]:
        """Names of gathered copies that disagreed with their partitions on any rank, so far."""
        return self._on_any_rank(self._stale)

    @property
    def overflown(self) -> tuple[str, ...]:
        """Names of tensors with values that became infinite when they were cast to fp16."""
        return self._on_any_rank(self._overflown)

    def _on_any_rank(self, names: set[str]) -> tuple[str, ...]:
        everywhere = set().union(*self._team.gather(names))
        return tuple(spec.name for spec in self.specs if spec.name in everywhere)

    def compare_ranks(self) -> frozenset[str]:
        """Return which of the tensors that every rank holds in full are not the same everywhere.

        **Collective.** Only rank 0 may write these (its values are what a stock save has). Buffers
        and unpartitioned parameters are compared by digest, not assumed to be equal.

        Raises:
            UnsupportedError: on every rank, when the ranks do not have the same tensors: all of
                them plan the files by themselves, so a difference would put bytes in wrong places.
        """
        if self._team.size == 1:
            return frozenset()
        self._refuse_different_models()
        digests = {
            entry.name: digest_of_tensor(entry.tensor).hex
            for entry in self._entries.values()
            if not entry.is_partitioned
        }
        if self._team.agrees_on(digests):
            return frozenset()
        everyone = self._team.gather(digests)
        return frozenset(
            name
            for name in digests
            if any(other.get(name) != everyone[0][name] for other in everyone)
        )

    def _refuse_different_models(self) -> None:
        described = {
            entry.name: (spec, entry.group, entry.is_partitioned, self._master(entry) is not None)
            for entry, spec in zip(self._entries.values(), self.specs, strict=True)
        }
        if self._team.agrees_on(described):
            return
        everyone = self._team.gather(described)
        names = dict.fromkeys(name for rank in everyone for name in rank)
        different = [n for n in names if any(r.get(n) != everyone[0].get(n) for r in everyone)]
        raise UnsupportedError(
            "the ranks do not hold the same tensors: "
            f"{listed(different or ['the same names in another order'])} (a name, shape, dtype or "
            "tie that only some ranks have). Build the same module on every rank."
        )

    def _spec(self, entry: Entry) -> TensorSpec:
        spec = entry.spec
        dtype = DTYPES["float32"] if self._master(entry) is not None else spec.dtype
        if self._cast is not None and spec.role == "parameter" and dtype.is_floating:
            dtype = self._cast
        return TensorSpec(name=spec.name, shape=spec.shape, dtype=dtype, role=spec.role)

    def _master(self, entry: Entry) -> Master | None:
        if self.weights == "live" or entry.role != "parameter":
            return None
        return self._live.masters.get(id(entry.tensor))

    def _refuse_meta(self) -> None:
        meta = [e.name for e in self._entries.values() if not e.is_partitioned and e.tensor.is_meta]
        if meta:
            raise UnsupportedError(f"on the meta device, without values to save: {listed(meta)}.")

    def _is_gathered_somewhere(self, entry: Entry) -> bool:
        return self._team.any(gathered_copy(entry.tensor) is not None)

    @contextlib.contextmanager
    def _gathered(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Gather from the partitions, and note which copies that were there disagree."""
        if not entries:
            yield
            return
        from deepspeed.runtime.zero import GatheredParameters

        parameters: list[Any] = [entry.tensor for entry in entries]
        copies = [gathered_copy(parameter) for parameter in parameters]
        sizes = {entry.name: entry.spec.size_bytes for entry in entries}
        with set_aside(parameters), contextlib.ExitStack() as gathered:
            with peers_alive(f"gathering {entries[0].name} and what follows it"):
                for names in fill_buckets(sizes, _GATHER_BYTES):
                    group = [self._entries[name].tensor for name in names]
                    gathered.enter_context(GatheredParameters(group))
            with self._team.together("comparing gathered copies"):
                for entry, copy in zip(entries, copies, strict=True):
                    if copy is not None and not same_bits(copy, entry.tensor):
                        self._stale.add(entry.name)
            yield

    def _gather_master(self, entry: Entry) -> Tensor:
        """Return the whole fp32 master, bit for bit.

        Each rank puts its own range into zeros and the bit patterns are summed as integers: exact
        (also for NaN and negative zero) because only one rank has a non-zero pattern per element,
        whatever the ranges are.
        """
        master = self._master(entry)
        assert master is not None
        if master.group is None:
            return master.values
        import torch.distributed as dist

        device = "cpu" if dist.get_backend(master.group) == "gloo" else entry.tensor.device
        whole = torch.zeros(entry.spec.numel, dtype=torch.float32, device=device)
        whole[master.start : master.start + master.values.numel()] = master.values
        if whole.numel():
            with peers_alive(f"gathering the master of {entry.name}"):
                dist.all_reduce(whole.view(torch.int32), group=master.group)
        return whole
