"""Host memory for weights: a pool of buffers for what is read, repacked and dropped, and memory for what is kept.

malloc keeps what a thread has freed in arenas whose holes the next request does not fit into: repacking a
model matrix by matrix would make the process far larger than the model. So large tensors get anonymous maps
of their own. Dropped maps are reused, because faulting in new pages costs more than reading into old ones,
until `release_pool` unmaps them.

A decode step on a CPU reads every weight once. With 4 KB pages the core spends part of that time on TLB misses, so
`HugePageArena` has the first 128 MB of repacked weights in 2 MB pages; the rest is prefaulted.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from ..memory import anonymous_map

MIN_POOLED_BYTES = 2**16
"""Tensors of at least so many bytes get a map of their own."""

MAX_IDLE_BUFFERS = 6
"""Unused maps that the pool keeps."""

PREFAULT_CHUNK = 2**20
"""Bytes that one system call prefaults."""

HUGE_PAGE = 2**21
CHUNK_BYTES = 2**26
"""Address space that an arena maps at a time; the system provides pages only where they are written."""

MAX_HUGE_BYTES = 2**27
"""Bytes in huge pages for each model: the host of a virtual machine may be slow to provide more."""

_CACHE_LINE = 64
_POPULATE_READ = 22
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; before it, pages fault when touched


class _BufferPool:
    """Unused maps; a request gets the smallest that fits and is at most twice as large."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.RLock()  # re-entrant: a finalizer may call release while this thread holds the lock

    def acquire(self, size: int) -> mmap.mmap:
        with self._lock:
            fit = [one for one in self._idle if size <= len(one) <= 2 * size]
            if fit:
                found = min(fit, key=len)
                self._idle.remove(found)
                return found
        return anonymous_map(size)

    def release(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(buffer)
            if len(self._idle) > MAX_IDLE_BUFFERS:
                # Small maps are the cheapest to make again.
                self._idle.remove(min(self._idle, key=len))

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


_pool = _BufferPool()


def pooled_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory goes back to the pool when it is dropped."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    buffer = _pool.acquire(size)
    view = (ctypes.c_char * size).from_buffer(buffer)
    weakref.finalize(view, _pool.release, buffer).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(shape)


def prefaulted_zeros(size: int) -> Tensor:
    """`size` zero bytes in new pages, for memory that is kept; new pages need no clearing.

    On Linux the pages are faulted in together, which costs less than one by one at the first write.
    """
    if size < MIN_POOLED_BYTES:
        return torch.zeros(size, dtype=torch.uint8)
    buffer = torch.frombuffer(anonymous_map(size), dtype=torch.uint8)
    if sys.platform == "linux":
        # In chunks: during the call no other thread of the process can map memory.
        for start in range(0, size, PREFAULT_CHUNK):
            _libc().madvise(buffer.data_ptr() + start, min(PREFAULT_CHUNK, size - start), _POPULATE_WRITE)
    return buffer


class HugePageArena:
    """Allocates zeroed memory that is kept, in huge pages if any are left; safe to use from several threads.

    The memory of a chunk is freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._left = MAX_HUGE_BYTES if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") else 0

    def allocate(self, size: int) -> Tensor:
        """(size,) uint8."""
        allocated = self.allocate_huge(size)
        return prefaulted_zeros(size) if allocated is None else allocated

    def copy(self, table: Tensor) -> Tensor:
        """A copy in the arena: small tables are read as often as codes and would cause TLB misses elsewhere."""
        return self.allocate(table.nbytes).view(table.dtype).view(table.shape).copy_(table)

    def allocate_huge(self, size: int) -> Tensor | None:
        """(size,) uint8 in huge pages; None if too few are left."""
        aligned_size = -(-size // _CACHE_LINE) * _CACHE_LINE
        with self._lock:
            if aligned_size > self._left:
                return None
            if aligned_size > len(self._chunk):
                self._chunk = _map_huge(max(CHUNK_BYTES, aligned_size))
            allocated, self._chunk = self._chunk[:size], self._chunk[aligned_size:]
            self._left -= aligned_size
            return allocated


def _map_huge(size: int) -> Tensor:
    """A new mapping that begins with a huge page."""
    mapping = anonymous_map(size + HUGE_PAGE)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    return data[-data.data_ptr() % HUGE_PAGE :][:size]


def mapped_in_huge_pages(mapping: mmap.mmap, size: int) -> bool:
    """Whether the beginning of a mapped file, up to `size` bytes, is mapped in huge pages; reads it.

    Linux does that where the page cache has the file in folios of that size, in which it was written, or is now read
    because of MADV_HUGEPAGE, and the file system allows it.
    """
    size = min(size, len(mapping))
    if sys.platform != "linux" or size < HUGE_PAGE:
        return False
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if address % HUGE_PAGE or _libc().madvise(address, size, _POPULATE_READ):
        return False
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            lines = iter(file)
            if not any(line.startswith(f"{address:x}-") for line in lines):
                return False
            found = next((line.split()[1] for line in lines if line.startswith("FilePmdMapped:")), "0")
    except OSError:
        return False
    return int(found) * 1024 >= size - 2 * HUGE_PAGE


def release_pool() -> None:
    """Unmap the pool's unused buffers, and have malloc return its free memory (`trim_heap`)."""
    _pool.clear()
    trim_heap()


def trim_heap() -> None:
    """Have malloc return its free memory to the system, where the C library is glibc."""
    if sys.platform == "linux" and (found := getattr(_libc(), "malloc_trim", None)):  # the GNU library only
        found(0)


@cache
def _libc() -> ctypes.CDLL:
    loaded = ctypes.CDLL(None)
    loaded.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return loaded
