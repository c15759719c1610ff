"""Memory for numbers that are read, turned into another form and dropped.

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
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGE = 2**16
"""Bytes from which a map of its own is worth its while."""

KEPT = 6
"""Maps that wait to be used again."""

_OWN: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class _Maps:
    """Maps that nobody uses; who asks gets the smallest that is neither too small nor far too large."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a map may be dropped while its thread is in here

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            fit = [one for one in self._idle if size <= len(one) <= 2 * size]
            if fit:
                found = min(fit, key=len)
                self._idle.remove(found)
                return found
        return mmap.mmap(-1, size, **_OWN)

    def put(self, one: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(one)
            del self._idle[:-KEPT]

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


_maps = _Maps()


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory can be used again, or given back, when it is dropped."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    own = _maps.take(size)
    view = (ctypes.c_char * size).from_buffer(own)
    weakref.finalize(view, _maps.put, own).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(shape)


def give_back() -> None:
    """Return to the system what waits to be used again, here and in the C library."""
    _maps.clear()
    trim()


def trim() -> None:
    """Have the C library return to the system what it keeps for later, as far as it can be asked to."""
    if (found := _trim()) is not None:
        found(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Only the GNU library has it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
