"""A generator's loop with nothing in it but pages, a scheduler and the fake model."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from exlm.generator.pages import PageTable
from exlm.generator.scheduler import Chunk, Plan, Scheduler
from exlm.generator.sequence import Sequence
from exlm.testing import ScriptedRunner
from tests.generator.walk import Job


def job(*prompts: Ids[int], new: int = 4, max_skips: int | None = 4, salt: bytes = b"") -> Job:
    return Job([Sequence(list(ids), salt, len(ids) + new) for ids in prompts], max_skips)


class House:
    """A generator's loop with nothing but pages, scheduler and fake model; every token is 7."""

    def __init__(self, pages: int, size: int = 256, batch: int = 8, chunk: int = 2048) -> None:
        self.pages = PageTable(pages, size)
        self.scheduler: Scheduler[Job] = Scheduler(self.pages, batch, chunk)
        self.runner = ScriptedRunner(lambda ids: [7], pages, size, vocab=8)
        self.started: list[Job] = []
        self.events: list[Chunk[Job]] = []
        self.streamed: list[Job] = []

    def add(self, *jobs: Job) -> None:
        for one in jobs:
            self.scheduler.add(one)

    def step(self) -> None:
        """One round."""
        self.runner.computed, self.runner.steps = [], []
        self.started = self.scheduler.start()
        self.events = []
        while plan := self.scheduler.plan():
            self.run(plan)
        self.streamed = self.scheduler.ready()
        for one in self.streamed:
            rows = one.sequences
            self.runner.decode(rows, [row.cached for row in rows], [[row.ids[-1]] for row in rows])
            for row in rows:
                self.pages.commit(row, len(row))
                row.ids.append(7)
                self.pages.settle(row, len(row))
            if len(rows[0]) >= rows[0].limit:
                self.scheduler.finish(one)
        self.pages.check(row for one in self.scheduler.active for row in one.sequences)

    def run(self, plan: Plan[Job]) -> None:
        self.runner.copy(plan.copies)
        for chunk in plan.prefill:
            if chunk.end > chunk.start:
                self.runner.prefill(chunk.sequence, chunk.start, chunk.end)
        for chunk in plan.prefill:
            self.pages.commit(chunk.sequence, chunk.end)
        self.events += plan.prefill

    def finish(self) -> None:
        while self.scheduler.remaining:
            self.step()


def cached(one: Job) -> tuple[int, int]:
    return one.sequences[0].cached_pages, one.sequences[0].cached_tokens
