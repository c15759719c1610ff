"""Memory that runs out, as one typed error, whichever library noticed it and in whatever words.

Python raises MemoryError, the system's calls an OSError with ENOMEM, torch a RuntimeError of several texts, a
thread that cannot be started another one. Libraries written in Rust and C++ end the process instead, so that
they are called only after as much address space as they need was asked for and given back.
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

REMEDY = "Free memory, or raise the limit of this process (ulimit -v, or that of its container)."

WORDS = (
    "bad_alloc",
    "can't allocate memory",  # torch, on Linux
    "can't start new thread",
    "cannot allocate memory",
    "failed to map segment",  # a library that was to be loaded
    "not enough memory",  # torch, on Windows
    "out of memory",  # CUDA
)
"""What errors of torch, of the dynamic loader and of threads say where memory is what they lack."""


def ran_out(error: BaseException) -> bool:
    """Whether an error that is not exlm's own means that there was not enough memory or address space."""
    if isinstance(error, ExlmError):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if not isinstance(error, OSError | RuntimeError | ImportError):
        return False
    said = str(error).lower()
    return any(words in said for words in WORDS)


@contextmanager
def memory_errors(describe: Callable[[], str], remedy: str = REMEDY) -> Iterator[None]:
    """Within it, an error that means too little memory becomes a DoesNotFit.

    `describe` says what needed the memory, and how much that is where it is known; it is called only then.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise DoesNotFit(f"{describe()}: there is too little memory ({_reason(error)}). {remedy}") from error


def _reason(error: Exception) -> str:
    """The first line of what a library said, without the place in its source."""
    lines = str(error).strip().splitlines()
    said = re.sub(r"^\[enforce fail[^\]]*\] [^.]*\. ", "", lines[0]) if lines else ""
    return said[:200].rstrip(". ") or type(error).__name__


def has_address_space(size: int) -> bool:
    """Whether this process may map `size` more bytes, which is tried and undone.

    That finds a limit on the address space; whether there is memory behind it only its use would tell. It is
    tried on Linux alone: elsewhere there is no such limit, and the answer is yes.
    """
    if sys.platform != "linux":
        return True
    # Without MAP_NORESERVE memory would be promised for it; the constant has a name from Python 3.13 on.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ).close()
    except (OSError, OverflowError):
        return False
    return True


def require_address_space(size: int, what: str) -> None:
    """DoesNotFit unless this process may map `size` more bytes; `what` is the beginning of the message."""
    if not has_address_space(size):
        raise DoesNotFit(
            f"{what}: this needs {size / MB:,.0f} MB of address space, more than the process may still have. "
            f"{REMEDY}"
        )
