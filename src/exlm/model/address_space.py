"""What loading needs of a process whose address space is limited (`ulimit -v`), asked for before it begins.

Most of what fails there raises an error, which becomes a DoesNotFit. Threads do not: OpenMP ends the process
if it cannot start one. So the thread that loads has OpenMP start its threads while there is room for them,
and other threads read only where there is plenty.
"""

from __future__ import annotations

import os

import torch

from ..memory import has_address_space, require_address_space

REMEDY = (
    "Free memory, raise the limit of this process (ulimit -v, or that of its container), or load a smaller "
)
REMEDY += "model, one of fewer bits, or fewer tokens (config.max_seq_len)."

LEAST = 64 << 20
"""Bytes without which no model is loaded: what C libraries take when a thread first calls them."""

STACK = 8 << 20
"""Bytes of one thread's stack, as most systems have it."""

READERS = min(6, max(2, (os.cpu_count() or 1) // 2))
"""Threads that read ahead: one waits for the disk, another rearranges. More would wait for each other."""

FOR_READER = 256 << 20
"""Bytes one of them may come to take: its stack, an arena of the C library, OpenMP threads of its own."""

_SHARE = 32768
"""Elements that torch gives to one OpenMP thread at least: its grain size."""


def start_openmp(what: str) -> None:
    """Have OpenMP start the threads of the calling thread; DoesNotFit if there is no room for them.

    `what` is the beginning of the message. Where there is no limit, the first large operation starts them.
    """
    threads = torch.get_num_threads()
    require_address_space(LEAST + (threads - 1) * STACK, what)
    if _limited():
        torch.zeros(threads * _SHARE).add_(1)


def readers(total: int) -> int:
    """How many threads may read a model of `total` bytes: none where that much may not fit beside them."""
    return READERS if has_address_space(2 * total + READERS * FOR_READER) else 0


def _limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
