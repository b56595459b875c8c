"""Talking to the other ranks: who is there, who failed, what they say.

Besides sources and targets, the only module that calls collectives. Everything runs unchanged in
one process: without torch.distributed a `Team` has one member and nothing to wait for.

Control messages are small and go over gloo (the default group where that is its backend, else a
group of zckpt's own), so that a rank that died is noticed in seconds and training's collectives
are never mixed with ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zckpt.errors import AbsentRanksError, RankError, UsageError, ZckptError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_CONTROL_TIMEOUT = timedelta(hours=12)
"""Longest wait for a living but slow rank; a dead one is noticed by its closed connection."""


@dataclass(frozen=True)
class Team:
    """The ranks that make one call together.

    All methods but the attributes are collective: every rank of the team calls them, in the same
    order. With one rank they return at once.
    """

    rank: int
    size: int
    group: ProcessGroup | None = None
    """The gloo group for control messages; None with one rank."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank. The value is pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with peers_alive("talking to it"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. The value is pickled."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with peers_alive("talking to it"):
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def any(self, claim: bool) -> bool:
        """Whether the claim holds on any rank."""
        if self.size == 1:
            return claim
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(claim)], device="cpu")
        with peers_alive("talking to it"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def agrees_on(self, value: object) -> bool:
        """Whether the value looks the same on every rank. Only a digest of it is sent."""
        own = digest_of(value)
        return not self.any(self.broadcast(own) != own)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.any(False)

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Raise on every rank, at the end of the block, what any rank raised inside it.

        A rank that failed raises its own error. The others raise an error of the same class when
        it is one of zckpt's, else a `RankError`, that names the rank and what it was `doing`.
        The block itself must call no collective, since a failing rank leaves it early; see
        `through_collectives` for one that does.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 -- raised again below, on every rank
            error = caught
        if not self.any(error is not None):
            return
        errors = self.gather(None if error is None else _portable(error))
        if error is not None:
            raise error
        rank, first = next((r, e) for r, e in enumerate(errors) if e is not None)
        kind, text = first
        raise kind(f"rank {rank} failed while {doing}: {text}")

    @contextlib.contextmanager
    def through_collectives(self, doing: str) -> Iterator[None]:
        """Do as `together` does around a block that itself calls collectives.

        When only some ranks fail, the others may be waiting inside the block for a collective that
        the failed ones will never join, and nothing can wake them. A failed rank therefore waits
        only `_GRACE_S` for the others to get out and then raises alone; the others raise, with its
        message, as soon as its process ends (or the process group's own timeout strikes).
        """
        if self.size == 1:
            yield
            return
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        key = f"zckpt/block/{next(_next_block)}"
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 -- raised again below
            error = caught
            first = store.compare_set(
                f"{key}/failed", "", f"rank {self.rank} failed while {doing}: {caught!r}"
            )
        store.add(f"{key}/out", 1)
        if error is not None:
            deadline = time.monotonic() + _GRACE_S
            while store.add(f"{key}/out", 0) < self.size:
                if time.monotonic() > deadline:
                    _raise_alone(error, first.decode(), self.rank)
                time.sleep(0.02)
        with self.together(doing):
            if error is not None:
                raise error


def _raise_alone(error: Exception, first_failure: str, rank: int) -> NoReturn:
    """Raise the error, or what made it come: a peer that failed before it."""
    if first_failure.startswith(f"rank {rank} "):
        raise error
    raise RankError(first_failure) from error


def alone() -> Team:
    """Return a team of this process only, for work that needs no other rank."""
    return Team(rank=0, size=1)


def assemble(verb: str, signature: str, timeout_s: float) -> Team:
    """Return the team of all ranks once each of them has called the same verb.

    **Collective:** every rank of the default process group. In a process without
    torch.distributed it returns at once.

    Args:
        verb: the public function that is being called.
        signature: the arguments that have to be the same on every rank, as text.
        timeout_s: how long to wait for the other ranks, in seconds.

    Raises:
        AbsentRanksError: some ranks did not call within `timeout_s`; the message names them.
        UsageError: the ranks called with different arguments.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return alone()
    rank, size = dist.get_rank(), dist.get_world_size()
    _meet(verb, rank, size, timeout_s)
    team = Team(rank=rank, size=size, group=_control_group())
    calls = team.gather((verb, signature))
    different = [r for r, call in enumerate(calls) if call != calls[0]]
    if different:
        other = different[0]
        raise UsageError(
            f"every rank must make the same call; rank 0 called {calls[0][0]}({calls[0][1]}) and "
            f"rank {other} called {calls[other][0]}({calls[other][1]})."
        )
    return team


_next_meeting = itertools.count()
_next_block = itertools.count()

_GRACE_S = 5.0
"""How long a rank that failed between collectives waits for the others to get out of them."""


def _meet(verb: str, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks are in the same meeting, through the store and not a collective.

    Meetings are counted on each rank, and each has one outcome, set once: complete or abandoned. A
    rank that missed an abandoned meeting goes on to the next, so the count stays in step.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while True:
        key = f"zckpt/meeting/{next(_next_meeting)}"
        if not store.check([f"{key}/outcome"]):
            break
    outcome = f"{key}/outcome"
    store.set(f"{key}/{rank}", verb)
    if store.add(f"{key}/count", 1) == size:
        store.compare_set(outcome, "", "complete")
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while not store.check([outcome]):
        if time.monotonic() > deadline:
            store.compare_set(outcome, "", "abandoned")
        time.sleep(pause_s)
        pause_s = min(0.1, 1.2 * pause_s)  # many ranks must not flood the store
    if store.get(outcome) == b"complete":
        return
    absent = [r for r in range(size) if not store.check([f"{key}/{r}"])]
    raise AbsentRanksError(
        f"{verb} is collective: every rank has to call it. After {timeout_s:g} s rank(s) "
        f"{', '.join(map(str, absent))} of {size} had not. Call it outside of any "
        "`if rank == 0:`, or raise timeout_s if those ranks were only slow."
    )


_control_groups: dict[int, ProcessGroup] = {}


def _control_group() -> ProcessGroup:
    """Return the gloo group over all ranks, made once for each default process group."""
    import torch.distributed as dist

    default = dist.group.WORLD
    if default is None:
        raise RankError("torch.distributed was shut down during the call.")
    if dist.get_backend() == "gloo":
        return default
    if id(default) not in _control_groups:
        _control_groups[id(default)] = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    return _control_groups[id(default)]


@contextlib.contextmanager
def peers_alive(doing: str) -> Iterator[None]:
    """Raise a `RankError` where a collective in the block fails, as it does when a peer dies."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"lost another rank while {doing}: it probably died, so look at its output. ({error})"
        ) from error


def _portable(error: Exception) -> tuple[type[ZckptError], str]:
    """Return the class to raise on the other ranks and the text to raise it with."""
    if isinstance(error, ZckptError):
        return type(error), str(error)
    return RankError, f"{type(error).__name__}: {error}"


def digest_of(value: object) -> str:
    """Return a short digest of what a value looks like, to compare it across ranks cheaply."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
