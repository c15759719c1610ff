"""An engine reduced to a page table, a scheduler and a scripted model."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from exlm.generator.page_table import PageTable
from exlm.generator.scheduler import PrefillChunk, Scheduler
from exlm.generator.token_sequence import TokenSequence
from exlm.testing import ScriptedRunner
from tests.generator.page_table_oracle import check_invariants
from tests.generator.scheduler_fuzz import Job


def make_job(*prompts: Ids[int], new: int = 4, max_skips: int | None = 4, salt: bytes = b"") -> Job:
    return Job([TokenSequence(list(ids), salt, len(ids) + new) for ids in prompts], max_skips)


class SchedulerHarness:
    """A page table, a scheduler and a scripted model; every sampled token is 7."""

    def __init__(self, pages: int, size: int = 256, batch: int = 8, chunk: int = 2048) -> None:
        self.page_table = PageTable(pages, size)
        self.scheduler = Scheduler(self.page_table, batch, chunk)
        self.runner = ScriptedRunner(lambda ids: [7], pages, size, vocab_size=8)
        self.started: list[Job] = []
        self.chunks: list[PrefillChunk] = []
        self.decoded: list[Job] = []

    def add(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.add(job)

    def step(self) -> None:
        """Admit, prefill and decode once."""
        self.runner.prefill_lengths, self.runner.decode_batch_sizes = [], []
        self.started = self.scheduler.admit()
        self.chunks = []
        while batch := self.scheduler.next_prefill_batch():
            self.run_prefill_batch(batch)
        self.decoded = self.scheduler.decode_batch()
        for job in self.decoded:
            rows = job.sequences
            self.runner.decode(rows, [row.num_computed_tokens for row in rows], [[row.ids[-1]] for row in rows])
            for row in rows:
                self.page_table.mark_computed(row, len(row))
                row.ids.append(7)
                self.page_table.mark_final(row, len(row))
            if len(rows[0]) >= rows[0].max_length:
                self.scheduler.finish(job)
        check_invariants(self.page_table, (row for job in self.scheduler.active for row in job.sequences))

    def run_prefill_batch(self, batch: list[PrefillChunk]) -> None:
        self.runner.copy_pages([chunk.copy for chunk in batch if chunk.copy is not None])
        for chunk in batch:
            if chunk.end > chunk.start:
                self.runner.prefill(chunk.sequence, chunk.start, chunk.end)
        for chunk in batch:
            self.page_table.mark_computed(chunk.sequence, chunk.end)
        self.chunks += batch

    def run_to_end(self) -> None:
        while self.scheduler.num_unfinished:
            self.step()


def cached_counts(job: Job) -> tuple[int, int]:
    return job.sequences[0].cached_pages, job.sequences[0].cached_tokens
