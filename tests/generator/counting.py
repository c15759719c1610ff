"""Measures of work that depend little on the machine's load: bytecode instructions and CPU time."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """The bytecode instructions that a call executes; work inside C functions is not counted.

    The garbage collector is off meanwhile: other libraries' `gc.callbacks` would be counted when it happens to run.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def cpu_seconds(work: Callable[[], object]) -> float:
    """The CPU time that the process, with all its threads, spends on a call."""
    start = time.process_time()
    work()
    return time.process_time() - start
