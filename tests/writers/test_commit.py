"""The commit: a checkpoint exists whole or not at all, whenever the process dies."""

import errno
import os
import shutil
import signal
import subprocess

import pytest
import torch
from torch import nn

import zckpt
from zckpt.errors import (
    NoSpaceError,
    NotACheckpointError,
    TargetExistsError,
    UsageError,
)
from zckpt.manifest import MANIFEST_NAME
from zckpt.ranks import alone
from zckpt.testing import RanksError, run_ranks
from zckpt.writers import commit

OLD, NEW = 1.0, 2.0


def model_of(value, numel=300):
    """A plain module that is all one value."""
    model = nn.Linear(numel, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(value, target, **options):
    return zckpt.save_consolidated(model_of(value), target, **options)


def value_of(target):
    """The value that a checkpoint holds everywhere, after checking that it is whole."""
    assert zckpt.verify(target).is_fine
    (value,) = {v for t in zckpt.open(target).values() for v in t.flatten().tolist()}
    return value


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def two_steps(monkeypatch):
    """A system without renameat2."""
    monkeypatch.setattr(commit, "_exchange", lambda one, other: False)


# ------------------------------------------------------------------ check_target


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_absent_or_empty_target_is_fine(target, overwrite):
    commit.check_target(target, overwrite=overwrite)
    target.mkdir()
    commit.check_target(target, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced(target, overwrite):
    target.write_text("mine")
    with pytest.raises(TargetExistsError, match="is a file"):
        commit.check_target(target, overwrite=overwrite)


def test_a_checkpoint_is_replaced_only_when_asked_to(target):
    save(OLD, target)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        commit.check_target(target, overwrite=False)
    commit.check_target(target, overwrite=True)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.safetensors"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(target, name):
    target.mkdir()
    (target / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(TargetExistsError):
            commit.check_target(target, overwrite=overwrite)
        with pytest.raises(TargetExistsError):
            save(NEW, target, overwrite=overwrite)
    assert contents(target) == {name: b"mine"}
    assert hidden(target.parent) == []


def test_a_mount_point_is_refused(target, monkeypatch):
    target.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(UsageError, match="mount point"):
        commit.check_target(target, overwrite=True)


# ------------------------------------------------------------------ space


@pytest.mark.parametrize("spare, fits", [(0, True), (-1, False)])
def test_free_space_is_compared_with_what_is_needed(target, monkeypatch, spare, fits):
    free = 1000 + commit.SPARE_BYTES + spare
    usage = shutil.disk_usage(target.parent)._replace(free=free)
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage)
    if fits:
        commit.check_space(target / "deeper" / "still", 1000)
    else:
        with pytest.raises(NoSpaceError, match=f"{free:,} free"):
            commit.check_space(target / "deeper" / "still", 1000)
    assert asked == [target.parent]  # the nearest folder that exists


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(target, monkeypatch):
    save(OLD, target)
    usage = shutil.disk_usage(target.parent)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="100 free"):
        save(NEW, target, overwrite=True)
    assert value_of(target) == OLD
    assert hidden(target.parent) == []


@pytest.fixture(params=["real", "injected"])
def disk_that_fills(request, tmp_path, monkeypatch):
    """A folder on a disk that says it has room and has 256 KiB.

    The real one is a small tmpfs. Where this process may not mount, its pwrite fails as it would.
    """
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    is_mounted = (
        request.param == "real"
        and shutil.which("mount") is not None
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    )
    if not is_mounted:
        room = [1 << 18]
        pwrite = os.pwrite

        def pwrite_until_full(descriptor, data, position):
            room[0] -= len(data)
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(descriptor, data, position)

        monkeypatch.setattr(os, "pwrite", pwrite_until_full)
    yield place
    if is_mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_leaves_the_old_checkpoint(disk_that_fills):
    target = disk_that_fills / "out"
    save(OLD, target)
    before = contents(target)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        zckpt.save_consolidated(model_of(NEW, 200_000), target, overwrite=True)
    assert caught.value.errno == errno.ENOSPC
    assert contents(target) == before
    assert value_of(target) == OLD
    assert hidden(target.parent) == []
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        zckpt.save_consolidated(model_of(NEW, 200_000), disk_that_fills / "another")
    assert [path.name for path in disk_that_fills.iterdir()] == ["out"]


# ------------------------------------------------------------------ staging


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_staging_is_beside_the_target_and_goes_on_an_error(target, error):
    def fail_half_way():
        with commit.staged(alone(), target, overwrite=False) as staging:
            assert staging.folder.parent == target.parent
            assert staging.is_shared
            assert list(staging.folder.iterdir()) == []
            (staging.folder / "half").write_bytes(b"written")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert not target.exists()
    assert hidden(target.parent) == []


def test_missing_parents_are_made(tmp_path):
    save(NEW, tmp_path / "a" / "b" / "out")
    assert value_of(tmp_path / "a" / "b" / "out") == NEW


def test_leftovers_of_dead_saves_go_and_nothing_else(target):
    ours = target.parent / ".out.zckpt-staging-0123456789ab"
    (ours / "inside").mkdir(parents=True)
    others = [".other.zckpt-staging-1", ".out.zckpt", ".out2.zckpt-staging-1", ".out"]
    for name in others:
        (target.parent / name).mkdir()
    save(NEW, target)
    assert value_of(target) == NEW
    assert hidden(target.parent) == sorted(others)


def test_names_with_pattern_characters_are_taken_literally(tmp_path):
    target = tmp_path / "run[1]*"
    (tmp_path / ".run[1]*.zckpt-staging-x").mkdir()
    (tmp_path / ".run1x.zckpt-staging-x").mkdir()
    save(OLD, target)
    save(NEW, target, overwrite=True)
    assert value_of(target) == NEW
    assert hidden(tmp_path) == [".run1x.zckpt-staging-x"]


# ------------------------------------------------------------------ publishing


def test_it_appears_in_an_absent_and_in_an_empty_folder(target):
    save(NEW, target)
    assert value_of(target) == NEW
    shutil.rmtree(target)
    target.mkdir()
    save(OLD, target)
    assert value_of(target) == OLD
    assert hidden(target.parent) == []


@pytest.mark.parametrize("system", ["as it is", "without renameat2"])
def test_an_existing_checkpoint_is_replaced_whole(target, system, request):
    if system != "as it is":
        request.getfixturevalue("two_steps")
    save(OLD, target)
    (target / "added by hand.txt").write_text("of the old one")
    save(NEW, target, overwrite=True)
    assert value_of(target) == NEW
    assert not (target / "added by hand.txt").exists()
    assert hidden(target.parent) == []


def test_renameat2_that_is_missing_or_refuses_is_seen(tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    for place in (one, other):
        place.mkdir()
        (place / place.name).write_text("")
    assert commit._exchange(one, other)
    assert [p.name for p in one.iterdir()] == ["other"]
    with pytest.raises(FileNotFoundError):
        commit._exchange(one, tmp_path / "absent")
    for code in (errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(commit.ctypes, "get_errno", lambda code=code: code)
        assert not commit._exchange(one, tmp_path / "absent")
    monkeypatch.setattr(commit.ctypes, "CDLL", lambda *args, **kwargs: object())
    assert not commit._exchange(one, other)
    assert [p.name for p in one.iterdir()] == ["other"]


def test_a_target_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    save(OLD, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(NEW, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert value_of(tmp_path / "real") == NEW


# ------------------------------------------------------------------ recovering


def test_a_death_between_two_renames_is_mended_by_the_next_save(target, two_steps, monkeypatch):
    save(OLD, target)
    rename = os.rename
    calls = []

    def die_at_the_second(source, destination):
        calls.append(destination)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, destination)

    monkeypatch.setattr(os, "rename", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(NEW, target, overwrite=True)
    monkeypatch.setattr(os, "rename", rename)
    assert not target.exists()
    with pytest.raises(NotACheckpointError, match="zckpt-old"):
        zckpt.open(target)
    with pytest.raises(TargetExistsError):  # what was moved away is back, and protected
        save(NEW, target)
    assert value_of(target) == OLD
    save(NEW, target, overwrite=True)
    assert value_of(target) == NEW
    assert hidden(target.parent) == []


def test_recovering_deletes_an_old_checkpoint_that_has_a_successor(target):
    save(NEW, target)
    save(OLD, target.parent / ".out.zckpt-old-0123456789ab")
    commit.recover(target)
    assert value_of(target) == NEW
    assert hidden(target.parent) == []


def test_recovering_where_there_is_nothing_does_nothing(tmp_path):
    commit.recover(tmp_path / "no" / "such" / "place")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_no_successor(target):
    """Trainers make the output folder before they save into it, also after a crash."""
    save(OLD, target.parent / ".out.zckpt-old-0123456789ab")
    target.mkdir()
    commit.recover(target)
    assert value_of(target) == OLD


# ------------------------------------------------------------------ killed at every step


class Killer:
    """Kills this process at the n-th call of a function of `os`, before or after it acts."""

    def __init__(self, name, number, when):
        self.original, self.left, self.when = getattr(os, name), number, when

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.original(*args, **kwargs)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def save_and_die(target, function, number, when, is_exchanging):
    if not is_exchanging:
        commit._exchange = lambda one, other: False
    killer = Killer(function, number, when)
    setattr(os, function, killer)
    save(NEW, target, overwrite=True)
    return killer.left


def exchange_and_die(target, when):
    exchange = commit._exchange

    def dying(one, other):
        if when == "after":
            exchange(one, other)
        os.kill(os.getpid(), signal.SIGKILL)

    commit._exchange = dying
    save(NEW, target, overwrite=True)


def check_after_a_death(target):
    """The old or the new one is whole, and the next save succeeds. Returns what was found."""
    try:
        found = value_of(target)
    except NotACheckpointError:
        assert not target.exists()
        (waiting,) = target.parent.glob(".out.zckpt-old-*")
        assert value_of(waiting) == OLD
        found = None
    save(3.0, target, overwrite=True)
    assert value_of(target) == 3.0
    assert hidden(target.parent) == []
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "function, is_exchanging",
    [
        ("fsync", True),
        ("pwrite", True),
        ("unlink", True),
        ("rmdir", True),
        ("fsync", False),
        ("unlink", False),
        ("rmdir", False),
        ("rename", False),
    ],
)
def test_a_kill_before_any_call_leaves_the_old_or_the_new_one(target, function, is_exchanging):
    found, deaths = [], []
    for number in range(1, 30):
        shutil.rmtree(target, ignore_errors=True)
        save(OLD, target)
        try:
            left = run_ranks(
                save_and_die, 1, target, function, number, "before", is_exchanging, timeout_s=60
            )
        except RanksError as error:
            deaths.append(str(error))
            found.append(check_after_a_death(target))
        else:
            assert left[0] > 0  # it survived because there is no such call
            break
    else:
        pytest.fail("there was no end of calls")
    assert found
    assert all("SIGKILL" in death for death in deaths)
    order = [OLD, None, NEW]  # once the new one is there, it stays
    assert found == sorted(found, key=order.index)
    assert None not in found or not is_exchanging
    if function in {"unlink", "rmdir"}:
        assert NEW in found  # the old one is deleted last of all
    if function == "rename" and not is_exchanging:
        assert found == [OLD, None]


@pytest.mark.ranks
@pytest.mark.parametrize("when, expected", [("before", OLD), ("after", NEW)])
def test_a_kill_around_the_exchange_leaves_one_of_the_two(target, when, expected):
    save(OLD, target)
    with pytest.raises(RanksError, match="SIGKILL"):
        run_ranks(exchange_and_die, 1, target, when, timeout_s=60)
    assert check_after_a_death(target) == expected


@pytest.mark.ranks
def test_a_kill_after_the_last_rename_leaves_the_new_one(target):
    save(OLD, target)
    with pytest.raises(RanksError, match="SIGKILL"):
        run_ranks(save_and_die, 1, target, "rename", 2, "after", False, timeout_s=60)
    assert check_after_a_death(target) == NEW


@pytest.mark.ranks
@pytest.mark.parametrize("function", ["fsync", "pwrite", "rename"])
def test_a_kill_while_the_first_one_is_saved_leaves_nothing_or_it(target, function):
    found = []
    for number in range(1, 30):
        try:
            run_ranks(save_and_die, 1, target, function, number, "before", True, timeout_s=60)
        except RanksError:
            found.append(value_of(target) if target.exists() else None)
            shutil.rmtree(target, ignore_errors=True)
            save(NEW, target)
            assert hidden(target.parent) == []
            shutil.rmtree(target)
        else:
            break
    assert found
    assert found == sorted(found, key=[None, NEW].index)


# ------------------------------------------------------------------ rotation


def steps(folder):
    return sorted(
        int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*[0-9]")
    )


@pytest.fixture
def run(tmp_path):
    """Returns a function that saves checkpoints of these steps, the last one with the options."""

    def save_steps(*numbers, **options):
        for number in numbers[:-1]:
            save(float(number), tmp_path / f"checkpoint-{number}")
        return save(float(numbers[-1]), tmp_path / f"checkpoint-{numbers[-1]}", **options).removed

    return save_steps


def test_the_lowest_step_goes_first_by_number(run, tmp_path):
    removed = run(900, 1000, 10000, save_total_limit=2)
    assert removed == (tmp_path / "checkpoint-900",)
    assert steps(tmp_path) == [1000, 10000]
    assert hidden(tmp_path) == []
    assert value_of(tmp_path / "checkpoint-1000") == 1000.0


def test_times_of_files_mean_nothing(run, tmp_path):
    run(900, 1000)
    for number, when in ((900, 2_000_000_000), (1000, 1)):
        for path in (tmp_path / f"checkpoint-{number}").iterdir():
            os.utime(path, (when, when))
        os.utime(tmp_path / f"checkpoint-{number}", (when, when))
    assert run(10000, save_total_limit=2) == (tmp_path / "checkpoint-900",)


@pytest.mark.parametrize("limit, kept", [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_as_many_are_kept_as_the_limit_says(run, tmp_path, limit, kept):
    removed = run(1, 2, 3, 4, save_total_limit=limit)
    assert steps(tmp_path) == kept
    assert [path.name for path in removed] == [
        f"checkpoint-{n}" for n in (1, 2, 3, 4) if n not in kept
    ]


def test_without_a_limit_none_is_deleted(run, tmp_path):
    assert run(1, 2, 3) == ()
    assert steps(tmp_path) == [1, 2, 3]


def test_only_numbered_folders_with_a_manifest_are_counted_and_deleted(run, tmp_path):
    foreign = {
        "checkpoint-foo": {MANIFEST_NAME: b"{}"},
        "checkpoint-1": {"pytorch_model.bin": b"of another tool"},
        "checkpoint-2-backup": {MANIFEST_NAME: b"{}"},
        "my-checkpoint-3": {MANIFEST_NAME: b"{}"},
        "checkpoint-": {MANIFEST_NAME: b"{}"},
        "checkpoint--4": {MANIFEST_NAME: b"{}"},
    }
    for name, files in foreign.items():
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
    (tmp_path / "checkpoint-5").write_bytes(b"a file")
    assert [p.name for p in run(10, 20, 30, save_total_limit=2)] == ["checkpoint-10"]
    assert (tmp_path / "checkpoint-5").read_bytes() == b"a file"
    for name, files in foreign.items():
        assert contents(tmp_path / name) == files


def test_the_one_just_written_stays_beside_bigger_steps_of_an_old_run(run, tmp_path):
    run(1000, 2000)
    assert run(10, save_total_limit=2) == (tmp_path / "checkpoint-1000",)
    assert steps(tmp_path) == [10, 2000]
    assert run(20, save_total_limit=1)
    assert steps(tmp_path) == [20]


@pytest.mark.parametrize("limit, kept", [(1, [100, 400]), (2, [100, 400]), (3, [100, 300, 400])])
def test_a_pinned_one_is_never_deleted(run, tmp_path, limit, kept):
    run(100, 200, 300, 400, save_total_limit=limit, pinned=[tmp_path / "checkpoint-100"])
    assert steps(tmp_path) == kept


def test_a_pin_may_be_text_relative_or_a_link(run, tmp_path, monkeypatch):
    run(1, 2, 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").symlink_to("checkpoint-2")
    run(4, save_total_limit=1, pinned=["checkpoint-1", "best"])
    assert steps(tmp_path) == [1, 2, 4]
    assert value_of(tmp_path / "best") == 2.0


def test_links_are_never_deleted_nor_what_they_lead_to(run, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "archive"
    save(7.0, elsewhere)
    (tmp_path / "checkpoint-5").symlink_to(elsewhere)
    removed = run(10, 20, save_total_limit=1)
    assert removed == (tmp_path / "checkpoint-10",)
    assert (tmp_path / "checkpoint-5").is_symlink()
    assert value_of(elsewhere) == 7.0


def test_a_failed_save_deletes_nothing(run, tmp_path):
    run(1, 2)
    with pytest.raises(ZeroDivisionError):
        run(3, save_total_limit=1, eval_fn=lambda module: 1 / 0)
    assert steps(tmp_path) == [1, 2]
    assert hidden(tmp_path) == []


def test_what_a_dead_rotation_left_goes_with_the_next(run, tmp_path):
    run(1, 2)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".checkpoint-1.zckpt-removed-0123456789ab")
    (tmp_path / ".checkpoint-9.other").mkdir()
    run(3, save_total_limit=2)
    assert steps(tmp_path) == [2, 3]
    assert hidden(tmp_path) == [".checkpoint-9.other"]


@pytest.mark.parametrize(
    "name, step",
    [
        ("checkpoint-10", 10),
        ("checkpoint-0010", 10),
        ("checkpoint-", None),
        ("checkpoint-1a", None),
        ("xcheckpoint-1", None),
        ("checkpoint-1\n", None),
        ("global_step10", None),
    ],
)
def test_a_step_is_read_from_the_whole_name(tmp_path, name, step):
    assert commit.checkpoint_step(tmp_path / name) == step
