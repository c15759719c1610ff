"""Signs of life of one engine: when it last did something, how much waits, and what happened lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

MAX_EVENTS = 256


class Activity:
    """Told of every job and every result; asked by health checks and the watchdog."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self.clock = clock
        self.pending_jobs = 0
        """Jobs given to the engine that it has not finished or let go of."""
        self.tokens = 0
        """Results with a token, ever."""
        self.events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._last = clock()

    @property
    def stalled_seconds(self) -> float:
        """For how long it should have done something and did not."""
        return self.clock() - self._last if self.pending_jobs else 0.0

    def job_queued(self, what: str) -> None:
        """A job was handed over."""
        if not self.pending_jobs:
            self._last = self.clock()
        self.pending_jobs += 1
        self.record(what)

    def job_ended(self, what: str) -> None:
        """A job is finished, failed or dropped."""
        self.pending_jobs -= 1
        self._last = self.clock()
        self.record(what)

    def on_result(self, result: Mapping[str, Any]) -> None:
        """A result came."""
        self._last = self.clock()
        if result["stage"] == "streaming":
            self.tokens += 1
        elif result["stage"] == "prefill":
            self.record(f"job {result['serial']} read {result['curr_progress']} of {result['max_progress']}")
        else:
            self.record(f"job {result['serial']} started")

    def record(self, what: str) -> None:
        """Remember an event."""
        self.events.append((time.time(), what))
