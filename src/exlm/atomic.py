"""Files and folders that appear under their names complete or not at all, and locks between processes.

A file or folder is written under a temporary name beside its target, flushed to the disk and renamed. A
failure or an interrupt removes it; a folder that a killed process left is removed by the next one that makes
the same folder. Standard library only.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import CheckpointError, InputError

MODEL_SUBFOLDERS = ("additional_chat_templates", ".cache")
"""Folders that a model folder may hold; a folder that holds any other is not overwritten."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""Errors of flock on file systems without locks."""


@contextmanager
def atomic_file(target: Path, temp: Path | None = None, *, sync_folder: bool = False) -> Iterator[Path]:
    """A temporary path to write to, which is synced and renamed to `target` when the block ends.

    `temp` must be on the file system of `target`. If it is left out, it is `target` with the suffix .partial, and
    only one process at a time may write this target. With `sync_folder` the rename survives a power cut too.
    """
    temp = target.with_name(target.name + ".partial") if temp is None else temp
    try:
        yield temp
        sync_file(temp)
        temp.replace(target)
        if sync_folder:
            sync_dir(target.parent)
    except BaseException:
        with suppress(OSError, ValueError):  # ValueError: a name with a NUL in it
            temp.unlink()
        raise


def sync_file(path: Path) -> None:
    """Flush what was written to a file to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_dir(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def atomic_dir(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `target` when the block ends without an error.

    With `overwrite` it replaces an existing `target`, which is then deleted.
    """
    missing = [path for path in target.parents if not path.exists()]
    temp_dir, lock = None, None
    try:
        with report_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(target)
            # It is locked before it gets the name by which _remove_stale finds folders.
            temp_dir = _sibling_path(target, "new")
            temp_dir.mkdir()
            lock = _try_lock_dir(temp_dir)
            temp_dir = temp_dir.rename(_sibling_path(target, "partial"))
        yield temp_dir
        with report_write_errors(target):
            _rename_into_place(temp_dir, target, overwrite)
    except BaseException:
        if temp_dir is not None:
            shutil.rmtree(temp_dir, ignore_errors=True)
        for path in missing:  # the innermost first; one that is not empty stays
            with suppress(OSError):
                path.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def check_output_dir(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse a folder that is not empty, and one that contains a file that is to be read."""
    for source in sources:
        if target == source or target in source.parents:
            raise InputError(f"{target} is where the model is read from ({source}): choose another folder.")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file: choose another name for the new folder.")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    some = ", ".join(names[:4]) + (", …" if names[4:] else "")
    if not overwrite:
        raise InputError(f"{target} is not empty ({some}): ask to overwrite it, or choose another folder.")
    foreign = [path.name for path in target.iterdir() if path.is_dir() and path.name not in MODEL_SUBFOLDERS]
    if foreign or "config.json" not in names:
        raise InputError(
            f"{target} is not a model folder ({some}), and only those are overwritten: remove it yourself, "
            "or choose another folder."
        )


def check_disk_space(folder: Path, needed: int, what: str) -> None:
    """Refuse a disk that has fewer than `needed` bytes free; `what` is written to it, as the error says."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {what} takes about {needed / 2**20:,.0f} MiB, and the disk has "
            f"{free / 2**20:,.0f} MiB free. Make room, or choose another disk."
        )


@contextmanager
def report_write_errors(target: Path) -> Iterator[None]:
    """Raise a CheckpointError that names the folder in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target}: the folder could not be written ({error}).") from error


def lock_handle(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if the system has no such locks.

    If another process holds the lock, wait for it, or raise BlockingIOError without `wait`.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def lock_dir(folder: Path) -> int | None:
    """Lock a folder until the returned handle is closed; None if the system has no such locks.

    BlockingIOError if another process holds the lock.
    """
    if sys.platform == "win32":  # it opens no folders
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        locked = lock_handle(handle)
    except BaseException:
        os.close(handle)
        raise
    if not locked:
        os.close(handle)
    return handle if locked else None


def _try_lock_dir(folder: Path) -> int | None:
    """`lock_dir`, but None also if another process holds the lock or the folder cannot be opened."""
    try:
        return lock_dir(folder)
    except OSError:
        return None


def _sibling_path(target: Path, tag: str) -> Path:
    return target.with_name(f".{target.name}.{tag}-{uuid.uuid4().hex[:12]}")


def _rename_into_place(temp_dir: Path, target: Path, overwrite: bool) -> None:
    backup = None
    try:
        if target.is_dir() and overwrite and any(target.iterdir()):
            backup = target.rename(_sibling_path(target, "old"))
        elif target.is_dir():
            target.rmdir()  # fails if another process has filled it since
        temp_dir.rename(target)
    except BaseException:
        if backup is not None:
            backup.rename(target)
        raise
    if backup is not None:
        shutil.rmtree(backup, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove the temporary folders of killed processes; running processes hold locks on theirs."""
    for stale in target.parent.glob(glob.escape(f".{target.name}.partial-") + "*"):
        lock = _try_lock_dir(stale)
        if lock is not None:
            shutil.rmtree(stale, ignore_errors=True)
            os.close(lock)
