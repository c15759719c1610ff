"""The CUDA driver's library, loaded by ctypes. Standard library only: the command line uses it before torch."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def libcuda() -> Any | None:
    """The library, or None without a driver. Callers declare no argument types on it: it is shared."""
    try:
        return ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
