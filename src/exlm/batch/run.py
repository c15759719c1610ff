"""Run the rows of a batch on one generator, all of them in one continuous batch.

`rows` turns rows into requests and output into lines; the journal knows which rows are done. A row that
causes an error is answered with that error. Other errors end the run, and the next run continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from exlm import Generator, Job
from exlm.serve import Limits, ModelInfo, output_delta
from exlm.serve.responses import ResponseWriter

from .journal import Journal
from .rows import Row, RowHandler, Rows

QUEUE_FACTOR = 2
"""Jobs queued or running for each that can run at a time, so that a free slot is filled at once."""


@dataclass
class Progress:
    """The progress of a run."""

    done: int = 0
    """Answered rows, those of earlier runs included."""
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
    """Answer every row that is not in the journal yet; `on_progress` is called after every step."""
    handler = RowHandler(rows.sha256, journal.created, model, limits or Limits())
    return _BatchRun(rows, journal, generator, handler, on_progress).run()


@dataclass
class _BatchRun:
    rows: Rows
    journal: Journal
    generator: Generator
    handler: RowHandler
    on_progress: Callable[[Progress], object]
    progress: Progress = field(default_factory=Progress)
    finished: list[tuple[int, bytes]] = field(default_factory=list)
    """Lines that are not in the journal yet."""
    in_flight: dict[int, tuple[ResponseWriter, list[Job]]] = field(default_factory=dict)

    def run(self) -> Progress:
        unanswered = iter([index for index in range(len(self.rows.rows)) if index not in self.journal.done])
        try:
            more = True
            while more or self.in_flight:
                more = self._enqueue_rows(unanswered)
                for result in self.generator.iterate():
                    self._on_result(result)
                self._store()
            return self.progress
        finally:
            for _, jobs in self.in_flight.values():
                self._cancel(jobs)

    def _enqueue_rows(self, unanswered: Iterator[int]) -> bool:
        """Start rows until enough jobs are queued; returns whether more may be left."""
        while self.generator.num_remaining_jobs() < QUEUE_FACTOR * self.generator.max_batch_size:
            index = next(unanswered, None)
            if index is None:
                return False
            try:
                self._enqueue_row(index, self.rows.rows[index])
            except Exception as error:
                self._answer_with_error(index, error)
        return True

    def _enqueue_row(self, index: int, row: Row) -> None:
        writer = self.handler.response_writer(index, row)
        jobs = [
            Job(**arguments, identifier=(index, text_index))
            for text_index, arguments in enumerate(writer.request.job_arguments)
        ]
        try:
            self.generator.enqueue(jobs)
        except Exception:
            self._cancel(jobs)
            raise
        self.in_flight[index] = (writer, jobs)

    def _on_result(self, result: Any) -> None:
        index, text_index = result["identifier"]
        if index not in self.in_flight:  # another text of the row has failed
            return
        writer, jobs = self.in_flight[index]
        try:
            delta = output_delta(result, writer.request)
        except Exception as error:
            del self.in_flight[index]
            self._cancel(jobs)
            self._answer_with_error(index, error)
            return
        if delta is None:
            return
        writer.push(text_index, delta)
        if delta.finish is not None:
            self.progress.new_tokens += delta.finish.new_tokens
        if writer.done:
            del self.in_flight[index]
            self.finished.append((index, self.handler.success_line(index, self.rows.rows[index], writer)))

    def _answer_with_error(self, index: int, error: Exception) -> None:
        """Answer a row with the error it caused; raises other errors."""
        self.finished.append((index, self.handler.error_line(index, self.rows.rows[index], error)))
        self.progress.errors += 1

    def _store(self) -> None:
        self.journal.add(self.finished)
        self.finished.clear()
        self.progress.done = len(self.journal.done)
        self.on_progress(self.progress)

    def _cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.generator.cancel(job)
