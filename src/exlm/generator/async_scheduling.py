"""Async scheduling: the next decode pass is launched before the host reads the tokens of the last one.

The next pass takes the tokens from the device, where they were just sampled. The host makes text, stop
conditions and results while the device computes. If a job has ended or joined in between, the pass is
dropped: it has written keys and values only to positions that no sequence has reached, and a later pass
overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .job import Job
from .model_runner import ModelRunner


class InFlightDecode:
    """The decode pass in flight, if any: its jobs, and how many tokens each had when it was launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.discard()

    def discard(self) -> None:
        """Drop the pass in flight."""
        self._logits: Any = None
        self._jobs: list[Job] = []
        self._past: list[int] = []

    def take(self, jobs: Sequence[Job]) -> Any:
        """Logits of the pass, with a row at each job's `batch_row`; None, and it is dropped, if it is another
        batch's.

        Pages need not be compared: the page that was written to belongs to its sequence alone until it is
        full.
        """
        logits, self._logits = self._logits, None
        if logits is None or (jobs != self._jobs and not self._contains_all(jobs)):
            return None
        past = self._past
        return (
            logits
            if all([job.sequences[0].num_computed_tokens == past[job.batch_row] for job in jobs])
            else None
        )

    def launch_next(self, jobs: Sequence[Job], tokens: Any) -> None:
        """Launch the pass that is fed these tokens (jobs,), which are still on the device.

        For simple jobs; if all of them end with these tokens, nothing is launched.
        """
        if not any(job.output.new_tokens + 1 < job.max_new_tokens for job in jobs):
            return
        sequences = [job.sequences[0] for job in jobs]
        self._past = [len(sequence.ids) for sequence in sequences]
        self._logits = self._runner.decode_next(sequences, self._past, tokens)
        if jobs != self._jobs:  # else their rows are assigned
            self._jobs = list(jobs)
            for row, job in enumerate(jobs):
                job.batch_row = row

    def _contains_all(self, jobs: Sequence[Job]) -> bool:
        """Whether the pass is for all these jobs and for more."""
        return len(jobs) < len(self._jobs) and {*jobs} <= {*self._jobs}
