"""Timestamps of a job."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class RequestMetrics:
    """When things happened, by a clock that only runs forward; results report the differences, in seconds."""

    enqueued_at: float | None = None
    prefill_started_at: float | None = None
    first_decode_at: float | None = None
    finished_at: float | None = None

    @property
    def queue_seconds(self) -> float:
        """From enqueue to the first prefill."""
        return (self.prefill_started_at or self._now) - (self.enqueued_at or self._now)

    @property
    def prefill_seconds(self) -> float:
        """From there to the first token's forward pass."""
        return (self.first_decode_at or self._now) - (self.prefill_started_at or self._now)

    @property
    def generate_seconds(self) -> float:
        """From there to the end."""
        return (self.finished_at or self._now) - (self.first_decode_at or self._now)

    def sampled(self) -> None:
        """The forward pass that gives its first token begins."""
        self.first_decode_at = time.perf_counter()
        self.prefill_started_at = self.prefill_started_at or self.first_decode_at

    @property
    def _now(self) -> float:
        return self.finished_at or time.perf_counter()


class LegacyTimestamps:
    """A job's times as old scripts read them: by `time.time()`, None until it has happened."""

    metrics: RequestMetrics

    @property
    def time_enqueue(self) -> float | None:
        """When it was enqueued."""
        return _wall_clock(self.metrics.enqueued_at)

    @property
    def time_first_prefill(self) -> float | None:
        """When its prompt was begun."""
        return _wall_clock(self.metrics.prefill_started_at)

    @property
    def time_first_token(self) -> float | None:
        """When the pass that gave its first token was begun."""
        return _wall_clock(self.metrics.first_decode_at)

    @property
    def time_last_token(self) -> float | None:
        """When it ended."""
        return _wall_clock(self.metrics.finished_at)


def _wall_clock(moment: float | None) -> float | None:
    """A moment of the running clock as the time of day."""
    return None if moment is None else time.time() - (time.perf_counter() - moment)
