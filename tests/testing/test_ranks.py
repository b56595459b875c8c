"""run_ranks: real processes, real gloo; each test takes a promise of its docstring."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from zckpt.testing import RanksError, run_ranks

pytestmark = pytest.mark.ranks


@dataclasses.dataclass(frozen=True)
class Answer:
    """Defined in a test file, to go through pickle in both directions."""

    value: int


def total(first, *, second):
    tensor = torch.tensor([float(torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(tensor)
    return torch.distributed.get_rank(), tensor.item(), first + second


def own_rank():
    return int(os.environ["RANK"])


def add_rank(answer):
    return Answer(answer.value + own_rank())


def surroundings(names):
    return {name: os.environ.get(name) for name in names}, torch.get_num_threads()


def raise_on(rank, message):
    if own_rank() == rank:
        print("last words")
        raise RuntimeError(message)
    torch.distributed.barrier()


def raise_everywhere():
    message = f"mine is {own_rank()}"
    raise ValueError(message)


def kill_self(rank):
    if own_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def exit_silently(code):
    os._exit(code)


def sleep_for_good():
    time.sleep(3600)


def hang_on(rank):
    print("before it hung")
    if own_rank() == rank:
        sleep_for_good()


def return_a_lambda():
    return lambda: None


def say(word):
    print(word, own_rank())
    os.write(2, b"below Python\n")


def is_deepspeed_initialized():
    import deepspeed.comm

    return deepspeed.comm.is_initialized()


def process_id():
    return os.getpid()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Holder:
    @staticmethod
    def static():
        return own_rank()

    def method(self):
        return own_rank()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size):
    expected_sum = world_size * (world_size + 1) / 2
    results = run_ranks(total, world_size, 3, second=4)
    assert [(rank, expected_sum, 7) for rank in range(world_size)] == results


def test_classes_of_the_test_file_travel_both_ways():
    assert run_ranks(add_rank, 2, Answer(5)) == [Answer(5), Answer(6)]


def test_a_static_method_is_importable():
    assert run_ranks(Holder.static, 2) == [0, 1]


def test_environment_reaches_the_ranks(monkeypatch):
    monkeypatch.setenv("ZCKPT_OF_CALLER", "caller")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "ZCKPT_OF_CALLER",
        "ZCKPT_OF_CALL",
        "DS_ACCELERATOR",
    )
    found, threads = run_ranks(surroundings, 2, names, env={"ZCKPT_OF_CALL": "call"})[1]
    assert dict(zip(names, ("1", "1", "2", "caller", "call", "cpu"), strict=True)) == found
    assert threads == 1
    assert "RANK" not in os.environ


@pytest.mark.parametrize("deepspeed", [True, False])
def test_deepspeed_is_initialized_as_asked(deepspeed):
    assert run_ranks(is_deepspeed_initialized, 2, deepspeed=deepspeed) == [deepspeed] * 2


def test_a_failure_is_told_while_its_peer_waits_in_a_barrier():
    run_ranks(own_rank, 2)  # the server's first start is not what is measured
    started = time.monotonic()
    with pytest.raises(RanksError, match="rank 1 of 2 failed") as caught:
        run_ranks(raise_on, 2, 1, "the disk is full")
    assert time.monotonic() - started < 5
    assert next(iter(caught.value.failures)) == 1
    told = caught.value.failures[1]
    assert "RuntimeError: the disk is full" in told
    assert "in raise_on" in told
    assert "last words" in told


def test_ranks_that_fail_together_are_told_together():
    with pytest.raises(RanksError) as caught:
        run_ranks(raise_everywhere, 2)
    assert {0, 1} == set(caught.value.failures)
    for rank, told in caught.value.failures.items():
        assert f"ValueError: mine is {rank}" in told


def test_a_silent_death_is_named_by_its_signal():
    started = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(kill_self, 2, 1)
    assert time.monotonic() - started < 5
    assert str(caught.value).startswith("rank 1 of 2 failed: killed by SIGKILL before it returned")


@pytest.mark.parametrize("code", [0, 7])
def test_a_silent_exit_is_named_by_its_code(code):
    with pytest.raises(RanksError, match=f"exited with code {code} before it returned"):
        run_ranks(exit_silently, 1, code)


def test_a_hang_ends_in_time_and_says_who_and_where():
    started = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(hang_on, 3, 1, timeout_s=3)
    assert 3 <= time.monotonic() - started < 8
    assert caught.value.unfinished == (1,)
    assert str(caught.value).startswith("rank 1 of 3 still running after 3 s")
    assert "in sleep_for_good" in str(caught.value)
    assert "before it hung" in str(caught.value)


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure():
    with pytest.raises(RanksError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_output_is_handed_on(capsys):
    run_ranks(say, 2, "hello")
    lines = capsys.readouterr().out.splitlines()
    assert "[rank 0] hello 0" in lines
    assert "[rank 1] hello 1" in lines
    assert "[rank 1] below Python" in lines


def test_nothing_else_is_printed(capfd):
    run_ranks(own_rank, 2)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_no_process_is_left():
    assert not any(is_running(pid) for pid in run_ranks(process_id, 2))


def local_function():
    def local():
        return own_rank()

    return local


@pytest.mark.parametrize(
    "fn",
    [lambda: None, local_function(), Holder().method, functools.partial(own_rank)],
    ids=["lambda", "local", "method", "partial"],
)
def test_what_cannot_be_found_by_name_is_refused(fn):
    with pytest.raises(ValueError, match="module level"):
        run_ranks(fn, 1)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(own_rank, 0)


def test_a_script_can_run_its_own_functions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from zckpt.testing import run_ranks\n"
        "def size():\n"
        "    return torch.distributed.get_world_size()\n"
        "if __name__ == '__main__':\n"
        "    print(run_ranks(size, 2, deepspeed=False))\n"
    )
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "[2, 2]\n"), done.stderr


def test_twenty_in_a_row():
    for _ in range(20):
        assert run_ranks(own_rank, 2) == [0, 1]
