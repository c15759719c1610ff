"""A stopwatch around a block of code. Nothing in the house is timed with it."""

from __future__ import annotations

import time
from typing import Self


class Timer:
    """`with Timer() as t: …`, then `t.interval` is how long it took, in seconds."""

    start_time: float = 0.0
    end_time: float = 0.0
    interval: float = 0.0

    def __enter__(self) -> Self:
        """Start."""
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop, whatever happened."""
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time
