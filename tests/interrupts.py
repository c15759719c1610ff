"""Ctrl-C at a chosen place: KeyboardInterrupt once so many lines, or calls, of some files were reached."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal


@contextmanager
def interrupted(after: int, files: Collection[str], at: Literal["line", "call"] = "line") -> Iterator[None]:
    """In the block; `files` are names without folders. The interpreter itself looks for it at calls.

    Not in finalisers: there the interpreter reports it, and goes on.
    """
    left = after

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "call" and Path(frame.f_code.co_filename).name not in files:
            return None
        if event == at and frame.f_code.co_name != "__del__":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace if at == "line" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
