"""Whatever goes wrong on whatever rank: the old checkpoint is whole, no half one, nobody hangs."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import zckpt
import zckpt.errors
from zckpt.testing import RanksError, models, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.engine]

KILLS = [
    ("zckpt.writers.stream", "lay_out", 0, 1),
    ("zckpt.writers.stream", "write_all", 0, 1),
    ("zckpt.writers.stream", "write_all", 1, 3),
    ("zckpt.writers.commit", "_sync", 0, 1),
    ("zckpt.writers.commit", "_write_file", 0, 1),
    ("zckpt.writers.commit", "_write_file", 0, 2),
    ("zckpt.writers.commit", "_sync", 0, 4),
    ("zckpt.writers.commit", "_swap_in", 0, 1),
]
"""Module, function, rank and which call of it: each step of a save, in order."""


def first_checkpoint(out):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    zckpt.save_consolidated(engine, out)


def spoil(module_name, function_name, rank, call, action):
    """Replace a function of the writer on one rank so that its n-th call goes wrong."""
    import importlib

    module = importlib.import_module(module_name)
    original = getattr(module, function_name)
    calls = []

    def spoiled(*args, **kwargs):
        calls.append(None)
        if torch.distributed.get_rank() == rank and len(calls) == call:
            action(*args)
        return original(*args, **kwargs)

    setattr(module, function_name, spoiled)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full(*args):
    if args and isinstance(args[0], int):
        os.pwrite(args[0], b"half a write", args[2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_with_fault(out, module_name, function_name, rank, call, action):
    """What the save said on this rank, how long it took, and whether the ranks still work."""
    engine = models.make_engine(models.build("odd"), models.ds_config())
    models.train(engine, range(2))
    spoil(module_name, function_name, rank, call, {"kill": kill, "full": disk_full}[action])
    start = time.monotonic()
    try:
        zckpt.save_consolidated(engine, out, overwrite=True, bucket_bytes=3000)
        error = None
    except Exception as caught:  # noqa: BLE001 -- whatever it is, it is compared
        error = (type(caught).__name__, str(caught))
    seconds = time.monotonic() - start
    if action == "kill":
        Path(out).with_name(f"error-{engine.global_rank}").write_text(error[0])
    if action == "full":
        models.train(engine, range(2, 3))
        zckpt.save_consolidated(engine, out + "-next")
    return error, seconds


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_on_any_rank_is_an_error_on_all_and_leaves_the_old_checkpoint(rank, tmp_path):
    out = tmp_path / "out"
    run_ranks(first_checkpoint, 3, str(out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    fault = ("zckpt.writers.stream", "write_all", rank, 2, "full")
    for r, (error, seconds) in enumerate(run_ranks(save_with_fault, 3, str(out), *fault)):
        kind, text = error
        assert kind == ("OSError" if r == rank else "RankError")
        assert "No space left on device" in text
        assert r == rank or f"rank {rank} failed" in text
        assert seconds < 10
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert leftovers(tmp_path) == []
    assert zckpt.verify(tmp_path / "out-next").is_fine


@pytest.mark.parametrize("module, function, rank, call", KILLS)
def test_sigkill_at_any_step_leaves_a_whole_checkpoint(module, function, rank, call, tmp_path):
    out = tmp_path / "out"
    run_ranks(first_checkpoint, 2, str(out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(save_with_fault, 2, str(out), module, function, rank, call, "kill")
    assert "SIGKILL" in caught.value.failures[rank]
    assert (tmp_path / f"error-{1 - rank}").read_text() == "RankError"
    assert time.monotonic() - start < 30
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert zckpt.verify(out).is_fine
    run_ranks(save_again, 2, str(out))
    assert zckpt.verify(out).is_fine
    assert zckpt.open(out).manifest.provenance.global_step == 1
    assert leftovers(tmp_path) == []


def save_again(out):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    models.train(engine, range(1))
    zckpt.save_consolidated(engine, out, overwrite=True)


def only_some_ranks(out, absent):
    """Some ranks call, others do not; then all do."""
    engine = models.make_engine(models.build("odd"), models.ds_config())
    rank = engine.global_rank
    text, seconds = None, 0.0
    if rank not in absent:
        start = time.monotonic()
        with pytest.raises(zckpt.errors.AbsentRanksError) as caught:
            zckpt.save_consolidated(engine, out, timeout_s=2)
        text, seconds = str(caught.value), time.monotonic() - start
    else:
        time.sleep(3)
    report = zckpt.save_consolidated(engine, out, timeout_s=30)
    return text, seconds, report.path.name


@pytest.mark.parametrize("absent", [[1], [0], [1, 2]])
def test_a_call_that_only_some_ranks_make_names_the_absent_ones(absent, tmp_path):
    out = tmp_path / "out"
    for rank, (text, seconds, name) in enumerate(run_ranks(only_some_ranks, 3, str(out), absent)):
        if rank not in absent:
            assert f"rank(s) {', '.join(map(str, absent))} of 3" in text
            assert 2 <= seconds < 10
        assert name == "out"
    assert zckpt.verify(out).is_fine
    assert leftovers(tmp_path) == []


def different_arguments(out):
    engine = models.make_engine(models.build("odd"), models.ds_config())
    with pytest.raises(zckpt.errors.UsageError) as caught:
        zckpt.save_consolidated(engine, f"{out}-{engine.global_rank}")
    return str(caught.value)


def test_different_arguments_are_an_error_on_every_rank(tmp_path):
    for text in run_ranks(different_arguments, 2, str(tmp_path / "out")):
        assert "out-0" in text
        assert "out-1" in text
    assert list(tmp_path.iterdir()) == []


def bad_evaluation(out, failing):
    """An eval_fn that fails on some ranks before its forward pass."""
    engine = models.make_engine(models.build("odd"), models.ds_config())

    def evaluate(module):
        if engine.global_rank in failing:
            raise KeyError("no such batch")
        return models.evaluate(module)

    start = time.monotonic()
    try:
        zckpt.save_consolidated(engine, out, eval_fn=evaluate)
    except Exception as error:
        if len(failing) == 1:  # the others wait in a gather until this process ends
            raise
        return type(error).__name__, str(error), time.monotonic() - start


def test_an_evaluation_that_fails_everywhere_is_an_error_and_the_ranks_go_on(tmp_path):
    for kind, _, seconds in run_ranks(bad_evaluation, 2, str(tmp_path / "out"), [0, 1]):
        assert kind == "KeyError"
        assert seconds < 10
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_fails_on_one_rank_ends_in_seconds(tmp_path):
    start = time.monotonic()
    with pytest.raises(RanksError, match="no such batch"):
        run_ranks(bad_evaluation, 2, str(tmp_path / "out"), [1], timeout_s=60)
    assert time.monotonic() - start < 30
    assert not (tmp_path / "out").exists()


def folder_of_its_own(out):
    """Make rank 1 blind for the staging folder, as on another node with a local disk."""
    from zckpt.writers import commit

    engine = models.make_engine(models.build("odd"), models.ds_config())
    if engine.global_rank == 1:
        commit._sees = lambda folder, text: False
    report = zckpt.save_consolidated(engine, out)
    return report.writer_ranks, models.truth(engine.module)


def test_a_folder_that_not_every_rank_sees_is_written_by_rank_0(tmp_path):
    for writers, truth in run_ranks(folder_of_its_own, 2, str(tmp_path / "out")):
        assert writers == 1
        found = dict(zckpt.open(tmp_path / "out"))
        assert all(torch.equal(found[name], value) for name, value in truth.items())
