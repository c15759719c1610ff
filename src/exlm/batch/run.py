"""Running rows: each a request to one generator, all of them in one continuous batch.

What a row asks for, and how its answer is worded, is `wording`'s business; which rows are done is the
journal's. A row that is at fault is answered with an error. What is not a row's fault ends the run, and the
next run goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from exlm import Generator, Job
from exlm.serve import Limits, ModelInfo, ResponseBuilder, output_delta

from .adapter import RowAdapter
from .files import Row, Rows
from .journal import Journal

QUEUE_FACTOR = 2
"""Jobs that run or wait, for each that can run: a place that falls free is filled at once."""


@dataclass
class Progress:
    """How far a run has come."""

    done: int = 0
    """Rows with an answer, those of earlier runs included."""
    errors: int = 0
    """Rows that this run answered with an error."""
    new_tokens: int = 0
    """Tokens that this run has generated."""


def run_rows(
    rows: Rows,
    journal: Journal,
    generator: Generator,
    model: ModelInfo,
    limits: Limits | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Answer every row that the journal does not have yet; `told` is called after every step."""
    wording = RowAdapter(rows.sha256, journal.created, model, limits or Limits())
    return _BatchRun(rows, journal, generator, wording, on_progress).run()


@dataclass
class _BatchRun:
    rows: Rows
    journal: Journal
    generator: Generator
    adapter: RowAdapter
    on_progress: Callable[[Progress], object]
    progress: Progress = field(default_factory=Progress)
    finished: list[tuple[int, bytes]] = field(default_factory=list)
    """Answers that are not in the journal yet."""
    in_flight: dict[int, tuple[ResponseBuilder, list[Job]]] = field(default_factory=dict)

    def run(self) -> Progress:
        waiting = iter([place for place in range(len(self.rows.rows)) if place not in self.journal.done])
        try:
            more = True
            while more or self.in_flight:
                more = self._fill(waiting)
                for result in self.generator.iterate():
                    self._on_result(result)
                self._store()
            return self.progress
        finally:
            for _, jobs in self.in_flight.values():
                self._cancel(jobs)

    def _fill(self, waiting: Iterator[int]) -> bool:
        """Begin rows until there is work enough, refusals aside; whether more may be waiting."""
        while self.generator.num_remaining_jobs() < QUEUE_FACTOR * self.generator.max_batch_size:
            place = next(waiting, None)
            if place is None:
                return False
            try:
                self._start(place, self.rows.rows[place])
            except Exception as error:
                self._fail(place, error)
        return True

    def _start(self, place: int, row: Row) -> None:
        answer = self.adapter.prepare(place, row)
        jobs = [
            Job(**arguments, identifier=(place, text))
            for text, arguments in enumerate(answer.order.job_arguments)
        ]
        try:
            self.generator.enqueue(jobs)
        except Exception:
            self._cancel(jobs)
            raise
        self.in_flight[place] = (answer, jobs)

    def _on_result(self, result: Any) -> None:
        place, text = result["identifier"]
        if place not in self.in_flight:  # another text of the row has failed
            return
        answer, jobs = self.in_flight[place]
        try:
            piece = output_delta(result, answer.order)
        except Exception as error:
            del self.in_flight[place]
            self._cancel(jobs)
            self._fail(place, error)
            return
        if piece is None:
            return
        answer.push(text, piece)
        if piece.finish is not None:
            self.progress.new_tokens += piece.finish.new_tokens
        if answer.done:
            del self.in_flight[place]
            self.finished.append((place, self.adapter.success_line(place, self.rows.rows[place], answer)))

    def _fail(self, place: int, error: Exception) -> None:
        """Answer a row with an error if the row is at fault; else the run is over."""
        self.finished.append((place, self.adapter.error_line(place, self.rows.rows[place], error)))
        self.progress.errors += 1

    def _store(self) -> None:
        self.journal.add(self.finished)
        self.finished.clear()
        self.progress.done = len(self.journal.done)
        self.on_progress(self.progress)

    def _cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.generator.cancel(job)
