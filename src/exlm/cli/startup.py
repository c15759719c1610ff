"""Prepares the process before torch is imported: standard streams that are closed, the CUDA context.

If a program is started with `<&-` or `>&-`, as some service managers do, Python sets the stream to None, and
the next file that is opened gets its descriptor: messages of a library on standard error would go into that
file. `ensure_stdio` replaces such streams.

Creating a CUDA context takes a while, and so does importing torch. The command line knows early that a GPU
will be used, so `warm_up` creates the context in a thread meanwhile. Without a driver or a GPU it does
nothing, and errors are left for torch to report.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import sys
from collections.abc import Sequence
from threading import Thread

from .. import env
from ..libcuda import libcuda

GPU_COMMANDS = ("generate", "chat", "serve", "bench", "tune")
"""Commands that run a model on a GPU if there is one."""


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


def warm_up(arguments: Sequence[str]) -> None:
    """Start creating the context of the GPU that a command line will use, if any."""
    number = first_gpu(arguments, env.default_device())
    if number is not None:
        create_context(number)


def first_gpu(arguments: Sequence[str], default_device: str | None) -> int | None:
    """The index of the first GPU that a command line will use; None if it uses none."""
    if not arguments or arguments[0] not in GPU_COMMANDS or "--help" in arguments:
        return None
    device = default_device or "cuda"
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--device":
            device = after
        elif word.startswith("--device="):
            device = word.removeprefix("--device=")
    kind, _, number = device.partition(",")[0].strip().partition(":")
    return int(number or 0) if kind == "cuda" and (number or "0").isdecimal() else None


def create_context(number: int = 0) -> Thread:
    """Create a GPU's primary context, which the whole process shares and keeps, in a thread."""
    thread = Thread(target=_retain_context, args=(number,), name="exlm-context", daemon=True)
    thread.start()
    return thread


def _retain_context(number: int) -> None:
    driver = libcuda()
    if driver is None:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
