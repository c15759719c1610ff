"""A folder that appears under its name whole or not at all.

It is filled under a hidden name beside its place and renamed when it is complete. A failure or an interrupt
removes it; what a killed process left is removed by the next one that makes the same folder. What goes into
it is not known here.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import CheckpointError, InputError

MODEL_SUBFOLDERS = ("additional_chat_templates", ".cache")
"""Folders that a model folder may hold; with any other in it, it is not replaced."""


def check_output_dir(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse a place that is taken, or that what is to be read lies in."""
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


@contextmanager
def atomic_dir(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `target` when the block ends without an error.

    With `overwrite` it takes the place of a folder that is there, which then vanishes at once.
    """
    missing = [path for path in target.parents if not path.exists()]
    temp_dir, lock = None, None
    try:
        with report_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(target)
            # Locked before it has the name that others may sweep.
            temp_dir = _sibling_path(target, "new")
            temp_dir.mkdir()
            lock = _try_lock(temp_dir)
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


@contextmanager
def report_write_errors(target: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target}: the folder could not be written ({error}).") from error


def _sibling_path(target: Path, tag: str) -> Path:
    return target.with_name(f".{target.name}.{tag}-{uuid.uuid4().hex[:12]}")


def _rename_into_place(temp_dir: Path, target: Path, overwrite: bool) -> None:
    backup = None
    try:
        if target.is_dir() and overwrite and any(target.iterdir()):
            backup = target.rename(_sibling_path(target, "old"))
        elif target.is_dir():
            target.rmdir()  # fails if somebody has filled it meanwhile
        temp_dir.rename(target)
    except BaseException:
        if backup is not None:
            backup.rename(target)
        raise
    if backup is not None:
        shutil.rmtree(backup, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove what processes that were killed have left; those that run hold a lock."""
    for stale in target.parent.glob(glob.escape(f".{target.name}.partial-") + "*"):
        lock = _try_lock(stale)
        if lock is not None:
            shutil.rmtree(stale, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Hold a folder as long as this process lives; None if another does, or the system has no such lock."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
