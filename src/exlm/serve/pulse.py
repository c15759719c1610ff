"""Signs of life of one engine: when it last did something, how much waits, and what happened lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

REMEMBERED = 256


class Pulse:
    """Told of every job and every result; asked by health checks and the watchdog."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self.clock = clock
        self.waiting = 0
        """Jobs given to the engine that it has not finished or let go of."""
        self.tokens = 0
        """Results with a token, ever."""
        self.events: deque[tuple[float, str]] = deque(maxlen=REMEMBERED)
        self._last = clock()

    @property
    def silence(self) -> float:
        """For how long it should have done something and did not."""
        return self.clock() - self._last if self.waiting else 0.0

    def begin(self, what: str) -> None:
        """A job was handed over."""
        if not self.waiting:
            self._last = self.clock()
        self.waiting += 1
        self.note(what)

    def end(self, what: str) -> None:
        """A job is finished, failed or dropped."""
        self.waiting -= 1
        self._last = self.clock()
        self.note(what)

    def beat(self, result: Mapping[str, Any]) -> None:
        """A result came."""
        self._last = self.clock()
        if result["stage"] == "streaming":
            self.tokens += 1
        elif result["stage"] == "prefill":
            self.note(f"job {result['serial']} read {result['curr_progress']} of {result['max_progress']}")
        else:
            self.note(f"job {result['serial']} started")

    def note(self, what: str) -> None:
        """Remember an event."""
        self.events.append((time.time(), what))
