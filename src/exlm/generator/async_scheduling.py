"""Async scheduling: the next decode pass is launched before the host reads the tokens of the last one.

The next pass reads the sampled tokens on the device. While it runs, the host detokenizes, checks stop
conditions and builds results. If jobs have only ended in between, the others use their rows of the pass. If a job has
joined, or a sequence's length changed in another way, the pass is dropped: it wrote keys, values and recurrent states
only for positions that no sequence has reached, and a later pass overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .job import Job
from .model_runner import ModelRunner
from .page_table import PageTable
from .token_sequence import TokenSequence


class InFlightDecode:
    """The decode pass in flight, if any: its jobs, and how many tokens each had when it was launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.discard()

    def discard(self) -> None:
        """Drop the pass in flight."""
        self._logits: Any = None
        self._jobs: list[Job] = []
        self._sequences: list[TokenSequence] = []  # one of each job
        self._past: list[int] = []

    def take(self, jobs: Sequence[Job]) -> Any:
        """Logits of the pass in flight, a job's at its `batch_row`; None if it ran other jobs or tokens.

        Pages need not be compared: the pass writes to a page that is not full, and such a page belongs to one sequence.
        """
        logits, self._logits = self._logits, None
        if logits is None:
            return None
        if jobs == self._jobs:
            up_to_date = [sequence.num_computed_tokens for sequence in self._sequences] == self._past
        else:
            up_to_date = self._contains_all(jobs) and all(
                [job.sequences[0].num_computed_tokens == self._past[job.batch_row] for job in jobs]
            )
        return logits if up_to_date else None

    def launch_next(self, jobs: Sequence[Job], tokens: Any, page_table: PageTable) -> None:
        """Launch the pass that reads `tokens` (jobs,), which are on the device; all jobs have `is_simple`.

        Nothing is launched if these tokens reach every job's limit.
        """
        self._logits = None
        if jobs != self._jobs:
            self._assign_rows(jobs)
        sequences = self._sequences
        for sequence in sequences:
            if len(sequence.ids) + 1 < sequence.max_length:
                break
        else:
            return
        self._past = [len(sequence.ids) for sequence in sequences]
        if page_table.states is not None:
            for sequence, past in zip(sequences, self._past, strict=True):
                page_table.states.plan_decode(sequence, past, 1, is_final=True)
        self._logits = self._runner.decode_next(sequences, self._past, tokens)

    def _assign_rows(self, jobs: Sequence[Job]) -> None:
        """Take over a new list of jobs, and give each its row in the batch."""
        self._jobs = list(jobs)
        self._sequences = [job.sequences[0] for job in jobs]
        for row, job in enumerate(jobs):
            job.batch_row = row

    def _contains_all(self, jobs: Sequence[Job]) -> bool:
        """Whether the pass ran all these jobs, and others."""
        return len(jobs) < len(self._jobs) and {*jobs} <= {*self._jobs}
