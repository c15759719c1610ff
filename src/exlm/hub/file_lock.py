"""A lock between processes that survives the death of its owner.

Where the system has flock, the kernel releases the lock when its owner ends. Elsewhere (Windows, some network
file systems) the lock is a file whose owner updates its time as a heartbeat; a file without a recent
heartbeat is stale and may be taken over. The lock only avoids duplicate work: downloads stay correct without
it.
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
"""Seconds between heartbeats."""

STALE_SECONDS = 10.0
"""Seconds without a heartbeat after which a lock is stale."""


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock during the block; `on_wait` is called once if another process holds it."""
    # The file is never deleted: two processes could then lock different files.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _flock(handle, on_wait):
            yield
        else:
            with heartbeat_lock(path.with_name(path.name + ".held"), on_wait):
                yield
    finally:
        os.close(handle)


def _flock(handle: int, on_wait: Callable[[], object]) -> bool:
    """Take the kernel's lock; False if the file system has none."""
    try:
        return lock_handle(handle)
    except BlockingIOError:
        on_wait()
        return lock_handle(handle, wait=True)


@contextmanager
def heartbeat_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold a lock that consists of a file and its heartbeat."""
    mark = uuid.uuid4().hex
    announced = False
    while not _create(path, mark):
        if not announced:
            on_wait()
            announced = True
        _wait_for_release(path)
    released = threading.Event()
    heartbeats = threading.Thread(target=_send_heartbeats, args=(path, released), name="exlm-lock", daemon=True)
    heartbeats.start()
    try:
        yield
    finally:
        released.set()
        heartbeats.join()
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == mark:  # else another process found the lock stale and took it
                path.unlink()


def _create(path: Path, mark: str) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(mark)
    return True


def _send_heartbeats(path: Path, released: threading.Event) -> None:
    while not released.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _wait_for_release(path: Path) -> None:
    """Wait until the lock file is gone, removing it if it becomes stale.

    Staleness is measured by our own clock from the last change seen: the file's time may be another
    machine's.
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
    """A value that changes with every heartbeat and every new owner; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
