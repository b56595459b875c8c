"""`resync`: refresh gathered copies that no longer are what the partitions say."""

from __future__ import annotations

from typing import Any

import torch

from zckpt.live import look_at
from zckpt.plan import fill_buckets
from zckpt.ranks import assemble
from zckpt.sources.engine import LiveSource
from zckpt.targets.model import settle
from zckpt.zero import gathered_copy


def resync(engine: Any, *, bucket_bytes: int = 512 << 20, timeout_s: float = 60.0) -> list[str]:
    """Overwrite stale gathered copies with their partitions and return their names.

    A fused optimizer (LOMO and its kin) updates the partitions and leaves copies of persistent
    parameters, and of embeddings, as they were; the model then computes with weights that are not
    the trained ones. This puts that right for any kind of engine, wherever its optimizer hides. It
    changes what the next step computes: that is its purpose.

    **Collective:** call it on every rank, between steps (not between forward and backward).

    **Memory:** one bucket on each rank.

    Args:
        engine: an engine or a module with ZeRO-3 partitions; for others there is nothing to do.
        bucket_bytes: most bytes gathered at a time, at least one parameter.
        timeout_s: how long to wait for ranks that have not made the call, in seconds.

    Raises:
        UnsupportedError: neither an engine nor a module, or one whose ranks hold different models.
        AbsentRanksError, RankError: other ranks did not call, failed or died.
    """
    team = assemble("resync", f"{bucket_bytes=}", timeout_s)
    with team.together("looking at the model"):
        live = look_at(engine)
        source = LiveSource(live, team)
    settle(live)
    held = {e.name: copy for e in live.partitioned if (copy := gathered_copy(e.tensor)) is not None}
    anywhere = set().union(*team.gather(set(held)))
    names = [entry.name for entry in live.partitioned if entry.name in anywhere]
    sizes = {name: source.window_bytes(name) for name in names}
    for bucket in fill_buckets(sizes, bucket_bytes):
        with source.window(bucket), torch.no_grad():
            for name in held.keys() & set(bucket):
                held[name].view(-1).copy_(source.value(name))
    return list(source.stale_copies)
