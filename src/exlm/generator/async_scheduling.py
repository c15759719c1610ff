"""Async scheduling: the next decode pass is launched before the host reads the tokens of the last one.

The next pass takes the tokens from the device, where they were just sampled. The host makes text, stop
conditions and results while the device computes. If a job has ended or joined in between, the pass is
dropped: it has written keys and values only to positions that no sequence has reached, and a later pass
overwrites them. This module opens no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .job import Job
from .token_sequence import TokenSequence


class DecodeAhead(Protocol):
    """What must be known of a model to let it run ahead."""

    def decode_next(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Any) -> Any:
        """Launch `decode` of one token each, (sequences,) on the device and not yet known; None if it can't.

        A negative token stands for a failure: what is computed from it does not matter and does no harm.
        Logits that were given before may be written over.
        """
        ...


class InFlightDecode:
    """At most one pass: whose it is, and how long their texts are in it."""

    def __init__(self, runner: DecodeAhead) -> None:
        self._runner = runner
        self.discard()

    def discard(self) -> None:
        """Drop the pass that is under way."""
        self._logits: Any = None
        self._jobs: list[Job] = []
        self._past: list[int] = []

    def take(self, jobs: Sequence[Job]) -> Any:
        """The pass: logits with a row at each job's `place`. None, and it is dropped, if it is not theirs.

        Pages need not be compared: the one that was written to is its sequence's own until it is full.
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
        """Launch the pass that begins with these tokens (jobs,), which are still on the device.

        For simple jobs; if all of them end here, nothing is launched.
        """
        if not any(job.output.new_tokens + 1 < job.max_new_tokens for job in jobs):
            return
        sequences = [job.sequences[0] for job in jobs]
        self._past = [len(sequence.ids) for sequence in sequences]
        self._logits = self._runner.decode_next(sequences, self._past, tokens)
        if jobs != self._jobs:  # else they are in their places
            self._jobs = list(jobs)
            for row, job in enumerate(jobs):
                job.batch_row = row

    def _contains_all(self, jobs: Sequence[Job]) -> bool:
        """Whether all of these, but not only these, are in the pass."""
        return len(jobs) < len(self._jobs) and {*jobs} <= {*self._jobs}
