"""Turns the different errors that mean too little memory into `DoesNotFit`.

Python raises MemoryError, system calls an OSError with ENOMEM, torch a RuntimeError with one of several
texts, starting a thread another RuntimeError. Libraries written in Rust and C++ end the process instead;
before they are called, `require_address_space` checks that the address space they need is available.
"""

from __future__ import annotations

import errno
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import DoesNotFit, ExlmError

MB = 2**20

MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for a map that does not count as committed memory; Python names it from 3.13 on."""

_ANONYMOUS: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

REMEDY = "Free memory, or raise the limit of this process (ulimit -v, or that of its container)."

OUT_OF_MEMORY_TEXTS = (
    "bad_alloc",
    "can't allocate memory",  # torch, on Linux
    "can't start new thread",
    "cannot allocate memory",
    "failed to map segment",  # a library that was to be loaded
    "not enough memory",  # torch, on Windows
    "out of memory",  # CUDA
)
"""Texts in errors of torch, the dynamic loader and threads that mean too little memory."""


def ran_out(error: BaseException) -> bool:
    """Whether an error, other than exlm's own, means too little memory or address space."""
    if isinstance(error, ExlmError):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if not isinstance(error, OSError | RuntimeError | ImportError):
        return False
    message = str(error).lower()
    return any(text in message for text in OUT_OF_MEMORY_TEXTS)


@contextmanager
def memory_errors(describe: Callable[[], str], remedy: str = REMEDY) -> Iterator[None]:
    """A context in which errors that mean too little memory become DoesNotFit.

    `describe` says what needed the memory, and how much if known; it is called only for such an error.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise DoesNotFit(f"{describe()}: there is too little memory ({_reason(error)}). {remedy}") from error


def _reason(error: Exception) -> str:
    """The first line of a library's message, without the source location."""
    lines = str(error).strip().splitlines()
    first_line = re.sub(r"^\[enforce fail[^\]]*\] [^.]*\. ", "", lines[0]) if lines else ""
    return first_line[:200].rstrip(". ") or type(error).__name__


def anonymous_map(size: int) -> mmap.mmap:
    """A private map of zeros; the system provides a page when it is written to."""
    return mmap.mmap(-1, size, **_ANONYMOUS)


def private_map(handle: int, size: int) -> mmap.mmap:
    """A private copy-on-write map of an open file: pages are read when touched, writes never reach the file."""
    if sys.platform == "linux":
        # A private writable map would count as committed memory, and a file may be larger than that.
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        return mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(handle, size, access=mmap.ACCESS_COPY)


def has_address_space(size: int) -> bool:
    """Whether this process may map `size` more bytes: maps and unmaps them.

    That finds a limit on the address space (ulimit -v), not whether there is memory for it. Systems other
    than Linux have no such limit: there the answer is yes.
    """
    if sys.platform != "linux":
        return True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ).close()
    except (OSError, OverflowError):
        return False
    return True


def require_address_space(size: int, what: str) -> None:
    """DoesNotFit unless this process may map `size` more bytes; `what` is the beginning of the message."""
    if not has_address_space(size):
        raise DoesNotFit(
            f"{what}: this needs {size / MB:,.0f} MB of address space, more than the process may still have. {REMEDY}"
        )
