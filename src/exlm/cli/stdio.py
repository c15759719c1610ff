"""The three standard streams, there whatever a caller has closed.

Who starts a program with `<&-` or `>&-`, as some service managers do, leaves Python with None in the place of
a stream, and the number free for the next file that is opened: what a library says on standard error would
be written into that file.
"""

from __future__ import annotations

import errno
import io
import os
import sys


class ClosedStdout(io.TextIOBase):
    """Standard output that was closed: text made for it is an error, not thrown away unsaid."""

    encoding = "utf-8"

    def writable(self) -> bool:
        """It would like to be."""
        return True

    def write(self, text: str) -> int:
        """Say that there is nowhere to write."""
        message = "standard output is closed, so there is nowhere to write: > /dev/null throws text away"
        raise OSError(errno.EBADF, message)


def ensure_stdio() -> None:
    """Put something in the place of each stream that is not there; calling it again does nothing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_devnull()  # takes the lowest number that is free, which is this one
    sys.stdin = sys.stdin or os.fdopen(_open_devnull())
    sys.stdout = sys.stdout or ClosedStdout()
    sys.stderr = sys.stderr or os.fdopen(_open_devnull(), "w")


def _open_devnull() -> int:
    return os.open(os.devnull, os.O_RDWR)
