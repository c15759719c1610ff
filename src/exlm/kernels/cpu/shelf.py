"""Where rearranged weights lie: side by side in the system's large pages, as far as those go.

A decode step reads every weight once, and with pages of 4 KB a processor spends a part of that time on
looking up where they are. Nothing is taken back piece by piece: a shelf goes when its weights do.
"""

from __future__ import annotations

import mmap
import sys
import threading

import torch
from torch import Tensor

from ...formats.room import fresh

LARGE_PAGE = 2**21
BOARD = 2**26
"""Bytes that the system is asked for at a time; what is not used of them is never given."""

MOST = 2**27
"""Bytes in large pages, for each model: a virtual machine's host may be slow to give them."""

_LINE = 64  # where a weight may begin
_ALONE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Shelf:
    """Hands out memory that is all zero; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._board = torch.empty(0, dtype=torch.uint8)
        self._left = MOST if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") else 0

    def take(self, size: int) -> Tensor:
        """So many bytes."""
        taken = self._taken(size, -(-size // _LINE) * _LINE)
        return fresh(size) if taken is None else taken

    def _taken(self, size: int, whole: int) -> Tensor | None:
        with self._lock:
            if whole > self._left:
                return None
            if whole > len(self._board):
                self._board = _board(max(BOARD, whole))
            taken, self._board = self._board[:size], self._board[whole:]
            self._left -= whole
            return taken


def shelved(table: Tensor, shelf: Shelf) -> Tensor:
    """A copy beside the codes: small, but read as often, and elsewhere it would have to be looked for."""
    return shelf.take(table.nbytes).view(table.dtype).view(table.shape).copy_(table)


def _board(size: int) -> Tensor:
    """New memory that begins with a large page."""
    own = mmap.mmap(-1, size + LARGE_PAGE, **_ALONE)
    own.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(own, dtype=torch.uint8)
    return whole[-whole.data_ptr() % LARGE_PAGE :][:size]
