"""Make a checkpoint exist at once or not at all.

A checkpoint is built in a staging folder beside its target and renamed when it is complete, synced
and described by its manifest. The target is not touched before that. A process that dies leaves the
old checkpoint, or the new one, and perhaps a staging folder that the next save removes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zckpt.errors import NoSpaceError, TargetExistsError, UsageError
from zckpt.manifest import MANIFEST_NAME, RUN_NAME, Manifest, RunRecord
from zckpt.ranks import Team

SPARE_BYTES = 4 << 20
"""Room left for the manifest, the index and config files when free space is checked."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def target_of(out_dir: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the folder to make, or raise a `UsageError`."""
    try:
        target = Path(out_dir).expanduser().resolve()
        target.exists()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise UsageError(f"out_dir={out_dir!r} is no path for a folder: {error}") from None
    return target


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        TargetExistsError: it is a file, or a folder that holds anything while `overwrite` is
            False, or a folder that is no zckpt checkpoint while it is True.
        UsageError: it is a mount point, which no rename can replace.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise TargetExistsError(f"{target} is a file; name a folder that is not there yet.")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise UsageError(
            f"{target} is the working directory or above it; name a folder of its own."
        )
    if os.path.ismount(target):
        raise UsageError(f"{target} is a mount point; name a folder inside it.")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise TargetExistsError(
            f"{target} is not empty; pass overwrite=True to replace the checkpoint in it, or name "
            "another folder."
        )
    if not (target / MANIFEST_NAME).is_file():
        raise TargetExistsError(
            f"{target} holds files but no {MANIFEST_NAME}, so it is no zckpt checkpoint and is not "
            "replaced; move it away or name another folder."
        )


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise a `NoSpaceError` unless the file system of `target` has room for that many bytes."""
    parent = next(folder for folder in target.parents if folder.exists())
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise NoSpaceError(
            f"{target} needs {needed_bytes + SPARE_BYTES:,} bytes and the file system has "
            f"{free_bytes:,} free. The old checkpoint, if any, has to stay until the new one is "
            "complete; make room or choose another disk."
        )


@dataclass(frozen=True)
class Staging:
    """A folder in which a checkpoint is being built."""

    folder: Path
    target: Path
    is_shared: bool
    """Whether every rank sees the folder: checked with a probe file, not assumed."""


@contextmanager
def staged(team: Team, target: Path, *, overwrite: bool) -> Iterator[Staging]:
    """Yield an empty staging folder beside the target; when the block fails, remove it again.

    **Collective.** What saves that died left beside the target is cleared first. Two saves to one
    target at the same time are not supported.

    Raises:
        TargetExistsError, UsageError: as `check_target` says, on every rank.
    """
    folder = probe = None
    with team.together("preparing the folder"):
        if team.rank == 0:
            recover(target)
            check_target(target, overwrite=overwrite)
            folder = _make_staging(target)
            probe = _write_probe(folder)
    folder, probe = team.broadcast((folder, probe))
    assert folder is not None
    assert probe is not None
    try:
        is_shared = not team.any(not _sees(folder, probe))
        with team.together("preparing the folder"):
            if team.rank == 0:
                (folder / _PROBE).unlink()
        yield Staging(folder, target, is_shared)
    except BaseException:
        if team.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


_PROBE = ".probe"


def _make_staging(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _besides(target, "staging"):
        shutil.rmtree(leftover)
    folder = target.parent / f".{target.name}.zckpt-staging-{secrets.token_hex(6)}"
    folder.mkdir()
    return folder


def _write_probe(folder: Path) -> str:
    text = secrets.token_hex(16)
    (folder / _PROBE).write_text(text)
    return text


def _sees(folder: Path, text: str) -> bool:
    """Whether this rank sees the probe. Network file systems get a second to show it."""
    deadline = time.monotonic() + 1.0
    while True:
        with suppress(OSError):
            if (folder / _PROBE).read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def publish(staging: Staging, manifest: Manifest, run: RunRecord) -> None:
    """Finish the staging folder and give it its final name: the commit. Call on one rank.

    In this order: every file is synced, the manifest written as the last file, the folder synced,
    the folder renamed, the parent synced. An existing checkpoint is swapped out in one step where
    the system can (Linux, renameat2), else in two, whose gap `recover` mends; it is deleted when
    the new one is in place.
    """
    folder, target = staging.folder, staging.target
    for path in folder.rglob("*"):
        _sync(path)
    _write_file(folder / RUN_NAME, run.to_json())
    _write_file(folder / MANIFEST_NAME, manifest.to_json())
    _sync(folder)
    old = _swap_in(folder, target)
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    """Have the operating system put a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_in(folder: Path, target: Path) -> Path | None:
    """Rename the folder to its target and return where the old checkpoint is now, if any."""
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
        return None
    if _exchange(folder, target):
        return folder
    old = target.parent / f".{target.name}.zckpt-old-{secrets.token_hex(6)}"
    target.rename(old)
    folder.rename(target)
    return old


def recover(target: Path) -> None:
    """Undo what a save that died inside `publish` left beside the target.

    A checkpoint that was moved away without a successor comes back (also where an empty folder has
    taken its place since); one that has a successor goes. Where something else has taken its place
    it stays where it is.
    """
    waiting = sorted(_besides(target, "old"), key=lambda old: old.stat().st_mtime, reverse=True)
    for old in waiting:
        if (target / MANIFEST_NAME).is_file():
            shutil.rmtree(old)
        elif not target.exists() or not any(target.iterdir()):
            old.rename(target)


def rotate(newest: Path, limit: int, pinned: Iterable[Path]) -> tuple[Path, ...]:
    """Delete the oldest `checkpoint-<step>` folders beside `newest` and return their paths.

    Oldest by step, as numbers. Only folders with a zckpt manifest count and only they are deleted;
    never `newest`, never a pinned one. Call on one rank, after the commit.
    """
    kept_always = {newest.resolve(), *(Path(path).resolve() for path in pinned)}
    candidates = sorted(
        (step, folder)
        for folder in newest.parent.iterdir()
        if (step := checkpoint_step(folder)) is not None
        and not folder.is_symlink()
        and (folder / MANIFEST_NAME).is_file()
    )
    for leftover in newest.parent.glob(".checkpoint-*.zckpt-removed-*"):
        shutil.rmtree(leftover)
    surplus = len(candidates) - limit
    removed: list[Path] = []
    for _, folder in candidates:
        if len(removed) >= surplus:
            break
        if folder.resolve() not in kept_always:
            doomed = folder.parent / f".{folder.name}.zckpt-removed-{secrets.token_hex(6)}"
            folder.rename(doomed)
            shutil.rmtree(doomed)
            removed.append(folder)
    return tuple(removed)


def checkpoint_step(folder: Path) -> int | None:
    """Return the step in a folder name of the form `checkpoint-<step>`, or None."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _besides(target: Path, what: str) -> list[Path]:
    if not target.parent.is_dir():
        return []
    prefix = f".{target.name}.zckpt-{what}-"
    return sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system cannot. Linux: man 2 renameat2."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or renameat2 is None:
        return False
    result = renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))
