"""One process at a time, and a dead one never in the way.

Where the system has flock, the kernel frees the lock with its owner. Elsewhere (Windows, some network file
systems) a file that its owner keeps touching stands for the lock; a file that nobody has touched for a while
belongs to nobody. The lock saves work and nothing else: what it protects must stay whole without it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..atomic import lock_handle

HEARTBEAT_SECONDS = 1.0
"""Seconds between two touches of a lock file that stands for the lock."""

STALE_SECONDS = 10.0
"""Seconds without a touch after which its owner counts as dead."""


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of that name during the block; `waiting` is called once if another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # stays on disk: removing it would split the lock
    try:
        if _flock(handle, on_wait):
            yield
        else:
            with heartbeat_lock(path.with_name(path.name + ".held"), on_wait):
                yield
    finally:
        os.close(handle)


def _flock(handle: int, on_wait: Callable[[], object]) -> bool:
    """Take the kernel's lock; False where there is none to take."""
    try:
        return lock_handle(handle)
    except BlockingIOError:
        on_wait()
        return lock_handle(handle, wait=True)


@contextmanager
def heartbeat_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold a lock that is nothing but a file and the habit of touching it."""
    mark = uuid.uuid4().hex
    told = False
    while not _create(path, mark):
        if not told:
            on_wait()
            told = True
        _wait_for_release(path)
    over = threading.Event()
    beating = threading.Thread(target=_send_heartbeats, args=(path, over), name="exlm-lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == mark:  # else somebody took us for dead
                path.unlink()


def _create(path: Path, mark: str) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(mark)
    return True


def _send_heartbeats(path: Path, over: threading.Event) -> None:
    while not over.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _wait_for_release(path: Path) -> None:
    """Return when the file is gone: given up by its owner, or taken from one that stopped touching it.

    Only changes count, timed by our own clock, because the file's times may come from another machine.
    """
    seen, since = _heartbeat(path), time.monotonic()
    while seen is not None:
        time.sleep(min(HEARTBEAT_SECONDS, STALE_SECONDS) / 10)
        now = _heartbeat(path)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALE_SECONDS:
            with contextlib.suppress(OSError):  # another waiter was faster
                aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
                path.rename(aside)
                aside.unlink()
            return


def _heartbeat(path: Path) -> tuple[int, int] | None:
    """What changes with every touch and every new owner; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
