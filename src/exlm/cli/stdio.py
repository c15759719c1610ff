"""Replaces standard streams that the parent process has closed.

If a program is started with `<&-` or `>&-`, as some service managers do, Python sets the stream to None, and
the next file that is opened gets its descriptor: messages of a library on standard error would go into that
file.
"""

from __future__ import annotations

import errno
import io
import os
import sys


class ClosedStdout(io.TextIOBase):
    """Stands for a closed standard output: writing raises OSError instead of losing the text."""

    encoding = "utf-8"

    def writable(self) -> bool:
        """True, so that writers get as far as the error of `write`."""
        return True

    def write(self, text: str) -> int:
        """Raise OSError."""
        message = "standard output is closed, so there is nowhere to write: > /dev/null throws text away"
        raise OSError(errno.EBADF, message)


def ensure_stdio() -> None:
    """Replace each closed stream; calling it again does nothing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_devnull()  # gets the lowest free descriptor, which is this one
    sys.stdin = sys.stdin or os.fdopen(_open_devnull())
    sys.stdout = sys.stdout or ClosedStdout()
    sys.stderr = sys.stderr or os.fdopen(_open_devnull(), "w")


def _open_devnull() -> int:
    return os.open(os.devnull, os.O_RDWR)
