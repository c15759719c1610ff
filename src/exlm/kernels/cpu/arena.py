"""The huge-page arena: memory for repacked weights, the first 128 MB of it in 2 MB pages.

A decode step reads every weight once. With 4 KB pages the core spends part of that time on TLB misses. The
memory of a chunk is freed with the last tensor in it.
"""

from __future__ import annotations

import mmap
import sys
import threading

import torch
from torch import Tensor

from ...formats.host_buffers import prefaulted_zeros

HUGE_PAGE = 2**21
CHUNK_BYTES = 2**26
"""Address space mapped at a time; the system provides pages only where they are written."""

MAX_HUGE_BYTES = 2**27
"""Bytes in huge pages for each model: the host of a virtual machine may be slow to provide more."""

_CACHE_LINE = 64
_PRIVATE_MAPPING = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class HugePageArena:
    """Allocates zeroed memory; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._left = MAX_HUGE_BYTES if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") else 0

    def allocate(self, size: int) -> Tensor:
        """(size,) uint8, in huge pages if any are left."""
        allocated = self._allocate_huge(size, -(-size // _CACHE_LINE) * _CACHE_LINE)
        return prefaulted_zeros(size) if allocated is None else allocated

    def _allocate_huge(self, size: int, aligned_size: int) -> Tensor | None:
        with self._lock:
            if aligned_size > self._left:
                return None
            if aligned_size > len(self._chunk):
                self._chunk = _map_chunk(max(CHUNK_BYTES, aligned_size))
            allocated, self._chunk = self._chunk[:size], self._chunk[aligned_size:]
            self._left -= aligned_size
            return allocated


def copy_to_arena(table: Tensor, arena: HugePageArena) -> Tensor:
    """A copy in the arena: small tables are read as often as codes and would cause TLB misses elsewhere."""
    return arena.allocate(table.nbytes).view(table.dtype).view(table.shape).copy_(table)


def _map_chunk(size: int) -> Tensor:
    """A new mapping that begins with a huge page."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, **_PRIVATE_MAPPING)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    return data[-data.data_ptr() % HUGE_PAGE :][:size]
