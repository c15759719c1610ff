"""Memory for weights that are kept, and how bytes of a file get there.

Large blocks ask for huge pages: most of the time of a load is the kernel's, handing out pages one by one.
Bytes are read, not mapped, so a file that is cut short meanwhile is an error like any other; pieces of a
large block are read side by side. What the bytes are is not known here.
"""

from __future__ import annotations

import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..errors import BadFile
from .header import damaged

READERS = 4
"""Threads that read one block: enough for a fast disk, and not too many for few cores."""

PIECE = 4 * 2**20
"""Bytes read at a time by one of them: a multiple of a huge page, so that no two of them touch the same."""

_HUGE = 2 * 2**20


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory on the CPU that nobody has touched: like `torch.empty`, but on huge pages if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # One huge page more than needed, to start at the border of one; what is never touched takes no memory.
    block = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    # Not the last few bytes: a whole huge page for them would be waste.
    block.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)
    return whole[start : start + size].view(dtype).view(shape)


def read_bytes(path: Path, size: int, offset: int, target: torch.Tensor) -> None:
    """Fill `target`, contiguous and on the CPU, from a file that must have `size` bytes in all."""
    if not target.numel():
        return
    block = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    if len(block) <= PIECE:
        _read_piece(path, size, offset, block)
        return
    starts = range(0, len(block), PIECE)
    with ThreadPoolExecutor(min(READERS, len(starts)), "exlm-read") as pool:
        for _ in pool.map(lambda at: _read_piece(path, size, offset + at, block[at : at + PIECE]), starts):
            pass


def check_size(path: Path, file: int, size: int) -> None:
    """BadFile if an open file has not the size it had when its header was read."""
    found = os.fstat(file).st_size
    if found != size:
        raise damaged(path, f"expected {size} bytes as when its header was read, found {found}")


def _read_piece(path: Path, size: int, offset: int, target: memoryview) -> None:
    try:
        # A handle for each piece: threads that share one would have to share its position too.
        with path.open("rb", buffering=0) as file:
            check_size(path, file.fileno(), size)
            file.seek(offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise damaged(path, f"expected {len(target)} more bytes, found its end")
                target = target[count:]
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error
