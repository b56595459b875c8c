"""Run a function on several real ranks: separate processes joined by torch.distributed.

Ranks are forked from a server process that has torch, DeepSpeed and pytest imported already, so two
of them start in about a tenth of a second where ``spawn`` needs ten. Each talks to the caller over
a pipe of its own, which is how a failure is told at once, while other ranks still wait in a
collective.

Not here: fixtures, models and engines. This module knows processes only, and the calling process
imports neither torch nor deepspeed for it.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import operator
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

__all__ = ["RanksError", "run_ranks"]

T = TypeVar("T")

_PRELOAD = (
    # The server skips what is not installed.
    "torch",
    "torch.distributed",
    # What deepspeed.initialize imports on its way: 1,500 modules, four seconds for each rank.
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "setuptools",
    "torch.utils.cpp_extension",
    "deepspeed",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "accelerate",
    "lomo_optim",
    # A forked rank imports the caller's __main__ again, and in a test run that is pytest.
    "pytest",
)

_GRACE_S = 0.3  # ranks that fail together are reported together; a lone failure waits this long
_STACKS_S = 0.5  # time for hung ranks to write where they are
_SHOWN_OUTPUT_CHARS = 10_000  # of each failed rank's own output, from its end


class RanksError(AssertionError):
    """Some ranks did not return: they raised, died, or were still running when the time was up.

    The message holds each failed rank's own traceback, or how it died, and the end of what it had
    printed.

    Attributes:
        failures: For each failed rank, its traceback or what became of it, first cause first.
        unfinished: Ranks that were still running, and were killed.
    """

    def __init__(
        self, message: str, failures: Mapping[int, str], unfinished: Sequence[int]
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.unfinished = tuple(unfinished)


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 120.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    deepspeed: bool | None = None,
    **kwargs: object,
) -> list[T]:
    """What ``fn(*args, **kwargs)`` returned on each of ``world_size`` ranks, in rank order.

    Each call starts new processes, so nothing leaks from one into the next. In each of them the
    default process group is up before ``fn`` is called and all ranks have reached it; it is taken
    down afterwards. torch uses one thread a rank. What ranks print is printed by the caller once
    they have ended.

    Environment variables are handed to the ranks at each call, but what a preloaded module reads
    when it is imported (``HF_HUB_OFFLINE``, ``OMP_NUM_THREADS``) is read once, at the first call in
    a process. With gloo, DeepSpeed runs on the CPU unless ``DS_ACCELERATOR`` says otherwise. Forked
    processes cannot use CUDA, so any other backend starts ranks with ``spawn``, and with nccl rank
    r uses device r.

    **Collective:** call it from one process that is no rank itself. It returns or raises when all
    of the processes it started have ended.

    Args:
        fn: A function at module level, in an importable module or in any file (a test module, say).
            The file is imported again in each rank, by pickle's rules: state set up at run time is
            not there.
        world_size: How many ranks, at least 1.
        *args: Picklable positional arguments for ``fn``.
        timeout_s: Seconds until ranks that have not returned count as hung. The clock starts when
            all processes exist, so that the server's first start does not count.
        backend: torch.distributed's backend.
        env: Variables to set in the ranks on top of this process's own environment and of the usual
            ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
            ``MASTER_PORT``.
        deepspeed: Whether to initialize through ``deepspeed.init_distributed``, which an engine
            needs. By default where it is installed.
        **kwargs: Picklable keyword arguments for ``fn``.

    Returns:
        One value for each rank. They come through pickle.

    Raises:
        RanksError: A rank raised, died, returned what cannot be pickled, or was not done after
            ``timeout_s``. Raised promptly: ranks that still run are killed, not waited for.
        ValueError: ``fn`` cannot be found by name (a lambda, a local function, a method of an
            object), or ``world_size`` is below 1.
        ImportError: ``deepspeed=True`` and it is not installed.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    is_installed = importlib.util.find_spec("deepspeed") is not None
    if deepspeed and not is_installed:
        raise ImportError("run_ranks(deepspeed=True) needs deepspeed: pip install 'zckpt[train]'")
    call = _Call(
        function=_FunctionRef.of(fn),
        arguments=pickle.dumps((args, kwargs)),
        world_size=world_size,
        backend=backend,
        uses_deepspeed=is_installed if deepspeed is None else deepspeed,
        timeout_s=timeout_s,
    )
    with tempfile.TemporaryDirectory(prefix="zckpt-ranks-") as folder:
        group = _Group(call, Path(folder))
        try:
            group.start(env or {})
            group.watch()
        finally:
            group.end()
        return [cast("T", result) for result in group.results()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionRef:
    """A function by name, and the file to import it from where the name alone will not do.

    A test module's name depends on how pytest was started, and is often not importable at all.
    """

    module: str
    qualname: str
    file: str | None

    @classmethod
    def of(cls, fn: Callable[..., object]) -> _FunctionRef:
        module = sys.modules.get(getattr(fn, "__module__", ""))
        qualname = getattr(fn, "__qualname__", repr(fn))
        try:
            is_found = operator.attrgetter(qualname)(module) is fn
        except AttributeError:
            is_found = False
        if module is None or not is_found:
            raise ValueError(
                "run_ranks needs a function at module level, which a new process can import by "
                f"name; {qualname} is a lambda, a local function, a bound method or a partial. "
                "Move it to the module, and hand over as arguments what it closed over."
            )
        return cls(module=fn.__module__, qualname=qualname, file=getattr(module, "__file__", None))

    def resolve(self) -> Callable[..., object]:
        """The function, in the rank's process. Imports its module; errors are that module's own."""
        return cast("Callable[..., object]", operator.attrgetter(self.qualname)(self._import()))

    def _import(self) -> types.ModuleType:
        if self.module == "__main__":  # multiprocessing has imported it already
            return sys.modules["__main__"]
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):  # of a parent package, or of a module without a spec
            spec = None
        if spec is not None and (self.file is None or spec.origin == self.file):
            return importlib.import_module(self.module)
        if self.file is None:
            raise ImportError(
                f"{self.module} is not importable in a new process and has no file",
                name=self.module,
            )
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be imported", name=self.module, path=self.file)
        module = importlib.util.module_from_spec(spec)
        # By this name, pickled arguments and results find their classes, which takes the packages
        # above it too. pytest's importlib mode makes the same empty ones.
        for dot in (i for i, character in enumerate(self.module) if character == "."):
            package = self.module[:dot]
            sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What every rank of one ``run_ranks`` call is told."""

    function: _FunctionRef
    # Pickled apart: their classes may be in the function's module, imported from its file.
    arguments: bytes
    world_size: int
    backend: str
    uses_deepspeed: bool
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One rank as the caller sees it."""

    number: int
    process: BaseProcess
    connection: Connection
    folder: Path
    result: bytes | None = None
    failure: str | None = None
    # Of the monotonic clock, which all processes share. 0 for a death: others then fail of it.
    failed_at_s: float = 0.0
    has_ended: bool = False

    def listen(self) -> None:
        """Take in what the rank has said, and whether it has ended."""
        # Asked first: once it has ended, its last words are in the pipe.
        has_ended = self.process.exitcode is not None
        try:
            while self.connection.poll():
                kind, payload = self.connection.recv()
                if kind == "returned":
                    self.result = payload
                else:
                    self.failed_at_s, told = payload
                    self.failure = f"{told.rstrip()}{self.output()}"
        except (EOFError, ConnectionError):  # its end of the pipe closes as it dies
            self.process.join()
            has_ended = True
        if has_ended and not self.has_ended:
            self.has_ended = True
            if self.failure is None and (self.result is None or self.process.exitcode != 0):
                when = "before" if self.result is None else "after"
                self.failure = f"{_death(self.process.exitcode)} {when} it returned{self.output()}"

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to be heard that changes what is reported."""
        return self.has_ended or self.result is not None or self.failure is not None

    def output(self) -> str:
        """The end of what the rank has printed, for a message; empty if it printed nothing."""
        text = (self.folder / "output").read_text(errors="replace").strip()
        return f"\n--- its output ---\n{text[-_SHOWN_OUTPUT_CHARS:]}" if text else ""


class _Group:
    """The processes of one call. Only these are ever signalled or killed."""

    def __init__(self, call: _Call, folder: Path) -> None:
        self._call = call
        self._folder = folder
        self._ranks: list[_Rank] = []

    def start(self, env: Mapping[str, str]) -> None:
        context = _context(self._call.backend)
        environment = {
            **({"DS_ACCELERATOR": "cpu"} if self._call.backend == "gloo" else {}),
            **os.environ,
            "WORLD_SIZE": str(self._call.world_size),
            "LOCAL_WORLD_SIZE": str(self._call.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        for number in range(self._call.world_size):
            folder = self._folder / f"rank{number}"
            folder.mkdir()
            (folder / "output").touch()
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(self._call, number, {**environment, **own, **env}, folder, sending),
                name=f"rank{number}",
            )
            process.start()
            sending.close()
            self._ranks.append(
                _Rank(number=number, process=process, connection=receiving, folder=folder)
            )

    def watch(self) -> None:
        """Return when every rank has returned and ended, or raise RanksError."""
        deadline = time.monotonic() + self._call.timeout_s
        while not all(rank.has_ended for rank in self._ranks):
            self._listen(deadline)
            if any(rank.failure for rank in self._ranks):
                self._listen_on(time.monotonic() + _GRACE_S)
                raise self._failed()
            if time.monotonic() >= deadline:
                raise self._hung()

    def results(self) -> list[object]:
        pickled = [rank.result for rank in self._ranks if rank.result is not None]
        return [pickle.loads(result) for result in pickled]  # noqa: S301 -- from our own processes

    def end(self) -> None:
        """Kill what still runs, and print what the ranks have printed."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
            for line in (rank.folder / "output").read_text(errors="replace").splitlines():
                sys.stdout.write(f"[rank {rank.number}] {line}\n")

    def _listen(self, until: float) -> None:
        """Wait for news from any rank that has not ended, until a time of the monotonic clock."""
        running = [rank for rank in self._ranks if not rank.has_ended]
        waits: list[Any] = [rank.connection for rank in running]
        waits += [rank.process.sentinel for rank in running]
        multiprocessing.connection.wait(waits, max(0.0, until - time.monotonic()))
        for rank in running:
            rank.listen()

    def _listen_on(self, until: float) -> None:
        while time.monotonic() < until and not all(rank.is_settled for rank in self._ranks):
            self._listen(until)

    def _failed(self) -> RanksError:
        # First cause first.
        failed = [rank for rank in self._ranks if rank.failure is not None]
        failed.sort(key=lambda rank: rank.failed_at_s)
        unfinished = [r.number for r in self._ranks if r.result is None and r.failure is None]
        parts = [
            f"rank {rank.number} of {self._call.world_size} failed: {rank.failure}"
            for rank in failed
        ]
        if unfinished:
            parts.append(f"still running, and killed: {_named(unfinished)}")
        failures = {rank.number: rank.failure or "" for rank in failed}
        return RanksError("\n\n".join(parts), failures, unfinished)

    def _hung(self) -> RanksError:
        running = [rank for rank in self._ranks if not rank.has_ended]
        # Where a rank waits for others at the end, those others are what is wrong.
        hung = [rank for rank in running if rank.result is None] or running
        for rank in hung:
            if rank.process.pid is not None and rank.process.exitcode is None:
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        numbers = [rank.number for rank in hung]
        size, timeout_s = self._call.world_size, self._call.timeout_s
        parts = [f"{_named(numbers)} of {size} still running after {timeout_s:g} s"]
        for rank in hung:
            stacks = (rank.folder / "stacks").read_text(errors="replace").strip()
            parts.append(f"rank {rank.number} was at:\n{stacks}{rank.output()}")
        return RanksError("\n\n".join(parts), {}, numbers)


def _context(backend: str) -> ForkServerContext | SpawnContext:
    """The preloaded server for gloo, fresh interpreters for what may use a GPU."""
    if backend != "gloo":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    is_unset = "DS_ACCELERATOR" not in os.environ
    if is_unset:
        # DeepSpeed chooses when it is imported, which only the server does.
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if is_unset:
            del os.environ["DS_ACCELERATOR"]
    return context


def _rank_main(
    call: _Call, rank: int, environment: Mapping[str, str], folder: Path, connection: Connection
) -> None:
    """The whole life of one rank's process."""
    _redirect_output(folder / "output")
    with (folder / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        os.environ.clear()
        os.environ.update(environment)
        try:
            fn = call.function.resolve()
            args, kwargs = pickle.loads(call.arguments)  # noqa: S301 -- from our own parent
            _join_group(call, rank, folder.parent / "store")
            result = fn(*args, **kwargs)
            connection.send(("returned", pickle.dumps(result)))
            _leave_group()
        except BaseException:  # noqa: BLE001 -- SystemExit and pytest's outcomes are failures too
            connection.send(("raised", (time.monotonic(), traceback.format_exc())))
            # Stay until the caller has heard the others: one that only lost its connection to this
            # rank has not failed by itself.
            time.sleep(2 * _GRACE_S)
        faulthandler.unregister(signal.SIGUSR1)


def _redirect_output(path: Path) -> None:
    """Send what this process prints, in Python or below it, to a file of its own."""
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # By line, so that what a rank printed outlives its being killed.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _join_group(call: _Call, rank: int, store: Path) -> None:
    import torch

    torch.set_num_threads(1)
    if call.backend == "nccl":
        torch.cuda.set_device(rank)
    # Longer than the caller waits, so that it is the caller who says that a rank hangs; finite, so
    # that ranks whose caller was killed end.
    timeout = timedelta(seconds=2 * call.timeout_s)
    if call.uses_deepspeed:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # On a CPU, DeepSpeed would reduce through shared memory instead of gloo, by an extension
        # that it compiles for half a minute first, and of which a killed rank leaves segments
        # behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            call.backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
            init_method=store.as_uri(),
            rank=rank,
            world_size=call.world_size,
        )
    else:
        torch.distributed.init_process_group(
            call.backend,
            timeout=timeout,
            init_method=store.as_uri(),
            rank=rank,
            world_size=call.world_size,
        )
    # Without it a rank may finish and leave while another still connects, which gloo reports as a
    # lost peer.
    torch.distributed.barrier()


def _leave_group() -> None:
    import torch

    if torch.distributed.is_initialized():  # a trainer may have ended it already
        torch.distributed.barrier()  # as above
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return cast("int", listener.getsockname()[1])


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
