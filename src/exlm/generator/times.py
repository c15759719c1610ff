"""When things happened to a job."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Times:
    """When things happened, by a clock that only runs forward; results report the differences, in seconds."""

    asked: float | None = None
    began: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def enqueued(self) -> float:
        """From enqueue to the first prefill."""
        return (self.began or self._now) - (self.asked or self._now)

    @property
    def prefill(self) -> float:
        """From there to the first token's forward pass."""
        return (self.first or self._now) - (self.began or self._now)

    @property
    def generate(self) -> float:
        """From there to the end."""
        return (self.ended or self._now) - (self.first or self._now)

    def sampled(self) -> None:
        """The forward pass that gives its first token begins."""
        self.first = time.perf_counter()
        self.began = self.began or self.first

    @property
    def _now(self) -> float:
        return self.ended or time.perf_counter()


class Timed:
    """A job's times as old scripts read them: by `time.time()`, None until it has happened."""

    times: Times

    @property
    def time_enqueue(self) -> float | None:
        """When it was enqueued."""
        return _on_the_wall(self.times.asked)

    @property
    def time_first_prefill(self) -> float | None:
        """When its prompt was begun."""
        return _on_the_wall(self.times.began)

    @property
    def time_first_token(self) -> float | None:
        """When the pass that gave its first token was begun."""
        return _on_the_wall(self.times.first)

    @property
    def time_last_token(self) -> float | None:
        """When it ended."""
        return _on_the_wall(self.times.ended)


def _on_the_wall(moment: float | None) -> float | None:
    """A moment of the running clock as the time of day."""
    return None if moment is None else time.time() - (time.perf_counter() - moment)
