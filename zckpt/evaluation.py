"""Evaluate a live model on the weights that are saved, and leave no trace of it.

The module computes through DeepSpeed's own hooks, which gather and release parameters as they go.
What an evaluation would change is kept and put back: gathered copies, the modes, counters and flags
of every module, buffers, random states, and the trace by which DeepSpeed prefetches (the evaluation
runs on a copy of it).
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zckpt.errors import UnsupportedError, UsageError
from zckpt.live import LiveModel
from zckpt.manifest import EvalRecord, Loss
from zckpt.names import listed
from zckpt.ranks import Team
from zckpt.tensors import same_bits
from zckpt.zero import set_aside

EvalFn = Callable[[nn.Module], float]


def check_can_evaluate(live: LiveModel, eval_fn: EvalFn) -> None:
    """Raise unless there is a function to call and a model whose forward can run as it is.

    Raises:
        UsageError: `eval_fn` is not callable.
        UnsupportedError: the module is partitioned and has no engine.
    """
    if not callable(eval_fn):
        raise UsageError(f"eval_fn={eval_fn!r}: expected a function of the module.")
    if live.kind == "zero.Init module":
        raise UnsupportedError(
            "eval_fn needs a module that can compute, and this one is partitioned without an "
            "engine; call deepspeed.initialize first, or save without eval_fn."
        )


def evaluate(
    live: LiveModel,
    team: Team,
    eval_fn: EvalFn,
    *,
    stale_copies: Sequence[str],
    is_of_saved_values: bool,
) -> EvalRecord:
    """Return what `eval_fn` says of the partitions, and of the stale copies where there are any.

    **Collective.** An error of `eval_fn` on any rank is raised on all.
    """
    with_stale = None
    if stale_copies:
        with_stale = _mean(_run(live, team, eval_fn, hide_copies=False))
    values = _run(live, team, eval_fn, hide_copies=True)
    floating = [p for p in live.module.parameters() if p.is_floating_point()]
    return EvalRecord(
        mean=Loss.of(_mean(values)),
        ranks=tuple(map(Loss.of, values)),
        weights="live",
        is_of_saved_values=is_of_saved_values,
        dtype=",".join(sorted({str(p.dtype).removeprefix("torch.") for p in floating})),
        device=",".join(sorted({p.device.type for p in floating})),
        with_stale_copies=None if with_stale is None else Loss.of(with_stale),
    )


def _run(live: LiveModel, team: Team, eval_fn: EvalFn, *, hide_copies: bool) -> list[float]:
    """Return every rank's value of `eval_fn`, in rank order."""
    value = 0.0
    before = _versions(live)
    with team.through_collectives("running eval_fn"):
        with _untouched(live, hide_copies=hide_copies):
            value = float(eval_fn(live.module))
        changed = [name for name, version in _versions(live).items() if version != before[name]]
        if changed:
            raise UsageError(f"eval_fn changed parameters: {listed(changed)}. They stay changed.")
    return team.gather(value)


def _versions(live: LiveModel) -> dict[str, int]:
    """Return how often autograd saw each unpartitioned parameter written to."""
    return {
        entry.name: entry.tensor._version  # noqa: SLF001 -- torch has no public name for it
        for entry in live.entries
        if entry.role == "parameter" and not entry.is_partitioned
    }


@contextlib.contextmanager
def _untouched(live: LiveModel, *, hide_copies: bool) -> Iterator[None]:
    """Run the block in eval mode without gradients, and put everything back."""
    module = live.module
    parameters = [entry.tensor for entry in live.partitioned]
    with (
        _counters_kept(module),
        _buffers_kept(module),
        _random_state_kept(),
        set_aside(parameters, hide=hide_copies),
        _scratch_trace(live),
        _torchs_own_linear(),
        torch.no_grad(),
    ):
        module.eval()
        yield


@contextlib.contextmanager
def _counters_kept(module: nn.Module) -> Iterator[None]:
    """Keep each module's own flags and counters: `training`, and those of DeepSpeed's hooks."""
    kept = [
        (child, {k: v for k, v in vars(child).items() if isinstance(v, (bool, int))})
        for child in module.modules()
    ]
    try:
        yield
    finally:
        for child, attributes in kept:
            vars(child).update(attributes)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    registered = [(child, dict(child.named_buffers(recurse=False))) for child in module.modules()]
    try:
        yield
    finally:
        for child, buffers in registered:
            for name, buffer in buffers.items():
                setattr(child, name, buffer)
        with torch.no_grad():
            for buffer, values in kept:
                if not same_bits(buffer, values):
                    buffer.copy_(values)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Keep the random states of torch (every device in use), Python and NumPy."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if has_cuda else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _scratch_trace(live: LiveModel) -> Iterator[None]:
    """Let DeepSpeed's coordinator work on copies of its queues and counters inside the block."""
    offload = live.offload
    if offload is None:
        yield
        return
    original = offload.param_coordinator
    in_flight = getattr(live.module, "ds_inflight_param_registry", None)
    scratch = copy.copy(original)
    scratch_in_flight: Any = {} if in_flight is None else type(in_flight)()
    for name, value in vars(original).items():
        if value is in_flight:
            setattr(scratch, name, scratch_in_flight)
        elif isinstance(value, (list, dict, set, deque)):
            setattr(scratch, name, copy.copy(value))
    offload.param_coordinator = scratch
    try:
        yield
    finally:
        for handle in list(scratch_in_flight.values()):
            handle.wait()
        offload.param_coordinator = original


@contextlib.contextmanager
def _torchs_own_linear() -> Iterator[None]:
    """Compute linear layers as a process without DeepSpeed does.

    ZeRO-3 replaces `torch.nn.functional.linear` in the whole process (`memory_efficient_linear`,
    deepspeed/runtime/zero/linear.py). Its replacement rounds the product before it adds the bias,
    so in 16 bits the same weights give another loss there than where they are reloaded.
    """
    module = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    patcher = getattr(module, "InsertPostInitMethodToModuleSubClasses", None)
    original = getattr(patcher, "linear_bk", nn.functional.linear)
    in_use = nn.functional.linear
    nn.functional.linear = original
    try:
        yield
    finally:
        nn.functional.linear = in_use


def _mean(values: Sequence[float]) -> float:
    """Return the mean; exactly the common value where all are equal."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
