"""Memory for numbers that are read, turned into another form and dropped, and for what they are turned into.

The C library keeps what a thread has freed for later, in places that the next request does not fit into; a
model that is turned matrix by matrix would end up far larger than it is. So large tensors get maps of their
own here. Maps that were dropped are used again, because new memory costs more than reading into it, until
they are given back.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from functools import cache

import torch
from torch import Tensor

MIN_POOLED_BYTES = 2**16
"""Bytes from which a map of its own is worth its while."""

MAX_IDLE_BUFFERS = 6
"""Maps that wait to be used again."""

PREFAULT_CHUNK = 2**20
"""Bytes of new memory that are asked for at a time."""

_POPULATE_WRITE = 23  # Linux knows it since 5.14; before that pages come when they are touched

_MMAP_FLAGS: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class _BufferPool:
    """Maps that nobody uses; who asks gets the smallest that is neither too small nor far too large."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a map may be dropped while its thread is in here

    def acquire(self, size: int) -> mmap.mmap:
        with self._lock:
            fit = [one for one in self._idle if size <= len(one) <= 2 * size]
            if fit:
                found = min(fit, key=len)
                self._idle.remove(found)
                return found
        return mmap.mmap(-1, size, **_MMAP_FLAGS)

    def release(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(buffer)
            if len(self._idle) > MAX_IDLE_BUFFERS:
                # The small ones are soon made again.
                self._idle.remove(min(self._idle, key=len))

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


_pool = _BufferPool()


def pooled_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory can be used again, or given back, when it is dropped."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    buffer = _pool.acquire(size)
    view = (ctypes.c_char * size).from_buffer(buffer)
    weakref.finalize(view, _pool.release, buffer).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(shape)


def prefaulted_zeros(size: int) -> Tensor:
    """So many bytes, all zero, to be kept: nobody had them before, so nobody has to clear them.

    Where the system gives many pages at a time it is asked to: that costs less than one by one, when each is
    first written.
    """
    if size < MIN_POOLED_BYTES:
        return torch.zeros(size, dtype=torch.uint8)
    buffer = torch.frombuffer(mmap.mmap(-1, size, **_MMAP_FLAGS), dtype=torch.uint8)
    if sys.platform == "linux":
        # Piece by piece: while the system fills one, no other thread can map or grow anything.
        for start in range(0, size, PREFAULT_CHUNK):
            _libc().madvise(buffer.data_ptr() + start, min(PREFAULT_CHUNK, size - start), _POPULATE_WRITE)
    return buffer


def release_pool() -> None:
    """Return to the system what waits to be used again, here and in the C library."""
    _pool.clear()
    trim_heap()


def trim_heap() -> None:
    """Have the C library return to the system what it keeps for later, as far as it can be asked to."""
    if sys.platform == "linux" and (found := getattr(_libc(), "malloc_trim", None)):  # the GNU library only
        found(0)


@cache
def _libc() -> ctypes.CDLL:
    loaded = ctypes.CDLL(None)
    loaded.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return loaded
