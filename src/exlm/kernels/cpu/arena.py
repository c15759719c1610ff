"""Where rearranged weights lie: side by side in the system's large pages, as far as those go.

A decode step reads every weight once, and with pages of 4 KB a processor spends a part of that time on
looking up where they are. Nothing is taken back piece by piece: a arena goes when its weights do.
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
"""Bytes that the system is asked for at a time; what is not used of them is never given."""

MAX_HUGE_BYTES = 2**27
"""Bytes in large pages, for each model: a virtual machine's host may be slow to give them."""

_CACHE_LINE = 64  # where a weight may begin
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class HugePageArena:
    """Hands out memory that is all zero; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._left = MAX_HUGE_BYTES if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") else 0

    def allocate(self, size: int) -> Tensor:
        """So many bytes."""
        taken = self._allocate_huge(size, -(-size // _CACHE_LINE) * _CACHE_LINE)
        return prefaulted_zeros(size) if taken is None else taken

    def _allocate_huge(self, size: int, whole: int) -> Tensor | None:
        with self._lock:
            if whole > self._left:
                return None
            if whole > len(self._chunk):
                self._chunk = _map_chunk(max(CHUNK_BYTES, whole))
            taken, self._chunk = self._chunk[:size], self._chunk[whole:]
            self._left -= whole
            return taken


def copy_to_arena(table: Tensor, arena: HugePageArena) -> Tensor:
    """A copy beside the codes: small, but read as often, and elsewhere it would have to be looked for."""
    return arena.allocate(table.nbytes).view(table.dtype).view(table.shape).copy_(table)


def _map_chunk(size: int) -> Tensor:
    """New memory that begins with a large page."""
    own = mmap.mmap(-1, size + HUGE_PAGE, **_PRIVATE)
    own.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(own, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]
