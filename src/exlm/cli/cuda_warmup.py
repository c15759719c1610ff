"""Creates the CUDA context in a thread while torch is being imported; each takes a while on its own.

Only the command line does this, since it knows early that a GPU will be used. Without a driver or a GPU
nothing happens, and errors are left for torch to report.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from threading import Thread
from typing import Any

from .. import env

GPU_COMMANDS = ("generate", "chat", "serve", "bench", "tune")
"""Commands that run a model on a GPU if there is one."""


def warm_up(arguments: Sequence[str]) -> None:
    """Start creating the context of the GPU that a command line will use, if any."""
    number = first_gpu(arguments, env.default_device())
    if number is not None:
        make_context(number)


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


def make_context(number: int = 0) -> Thread:
    """Create a GPU's primary context, which the whole process shares and keeps, in a thread."""
    thread = Thread(target=_retain_context, args=(number,), name="exlm-context", daemon=True)
    thread.start()
    return thread


def _retain_context(number: int) -> None:
    try:
        driver: Any = ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
