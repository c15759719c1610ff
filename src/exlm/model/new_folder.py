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

from ..errors import CheckpointError, InputError

OURS = ("additional_chat_templates", ".cache")
"""Folders that a model folder may hold; with any other in it, it is not replaced."""


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse a place that is taken, or that what is to be read lies in."""
    for source in sources:
        if target == source or target in source.parents:
            raise InputError(f"{target} is where the model is read from ({source}): choose another folder.")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file: choose another name for the new folder.")
    held = sorted(path.name for path in target.iterdir())
    if not held:
        return
    some = ", ".join(held[:4]) + (", …" if held[4:] else "")
    if not overwrite:
        raise InputError(f"{target} is not empty ({some}): ask to overwrite it, or choose another folder.")
    strange = [path.name for path in target.iterdir() if path.is_dir() and path.name not in OURS]
    if strange or "config.json" not in held:
        raise InputError(
            f"{target} is not a model folder ({some}), and only those are overwritten: remove it yourself, "
            "or choose another folder."
        )


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `target` when the block ends without an error.

    With `overwrite` it takes the place of a folder that is there, which then vanishes at once.
    """
    missing = [path for path in target.parents if not path.exists()]
    hidden, lock = None, None
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(target)
            # Locked before it has the name that others may sweep.
            hidden = _beside(target, "new")
            hidden.mkdir()
            lock = _lock(hidden)
            hidden = hidden.rename(_beside(target, "partial"))
        yield hidden
        with writing(target):
            _publish(hidden, target, overwrite)
    except BaseException:
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)
        for path in missing:  # the innermost first; one that is not empty stays
            with suppress(OSError):
                path.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target}: the folder could not be written ({error}).") from error


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{uuid.uuid4().hex[:12]}")


def _publish(hidden: Path, target: Path, overwrite: bool) -> None:
    aside = None
    try:
        if target.is_dir() and overwrite and any(target.iterdir()):
            aside = target.rename(_beside(target, "old"))
        elif target.is_dir():
            target.rmdir()  # fails if somebody has filled it meanwhile
        hidden.rename(target)
    except BaseException:
        if aside is not None:
            aside.rename(target)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what processes that were killed have left; those that run hold a lock."""
    for left in target.parent.glob(glob.escape(f".{target.name}.partial-") + "*"):
        lock = _lock(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
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
