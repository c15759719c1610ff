"""Turns: several callers on one generator, each of whom receives what becomes of its own jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Pieces

from ..errors import InputError
from ..generator import Generator, Job, StreamingResult
from .answers import Completion, completed, ids_of


class Turns:
    """Runs jobs to their ends; calls may be nested, and may come from several threads."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._inboxes: dict[Job, deque[StreamingResult]] = {}
        self._left: deque[Job] = deque()  # done with, or let go of: to be dropped between two rounds
        self._turn = generator.turn  # the same: with two, each could be held by who waits for the other
        self._inside = False  # whoever has the turn is in the midst of it

    def finish(self, jobs: Sequence[Job]) -> list[Completion]:
        """Run these jobs in one batch; returns when all are done."""
        tokens: dict[Job, list[int]] = {job: [] for job in jobs}
        last: dict[Job, StreamingResult] = {}
        for result in self._run(jobs):
            last[result["job"]] = result
            tokens[result["job"]] += ids_of(result)
        return [completed(last[job], tokens[job]) for job in jobs]

    def pieces(self, job: Job) -> Pieces[str, None, Completion]:
        """The text of a job as it comes, then the whole; a job that nobody reads on is dropped."""
        tokens: list[int] = []
        for result in self._run([job]):
            tokens += ids_of(result)
            if text := result.get("text"):
                yield text
        return completed(result, tokens)

    def close(self) -> None:
        """Drop every job, whoever waits for it."""
        self._alone(self.generator.clear_queue)

    def _run(self, jobs: Sequence[Job]) -> Iterator[StreamingResult]:
        """What becomes of these jobs until all are done; what becomes of others is kept for their callers."""
        own: deque[StreamingResult] = deque()
        left = len(jobs)

        def enter() -> None:
            for job in jobs:
                self._inboxes[job] = own
                self.generator.awaited.add(job)
                self.generator.enqueue(job)

        def look() -> None:
            if not own:
                self._round()

        try:
            self._alone(enter)
            while left:
                self._alone(look)
                while own:
                    result = own.popleft()
                    if "error" in result:
                        raise result["error"]
                    left -= result["eos"]
                    yield result
        finally:
            self._left.extend(jobs)
            with self._turn:
                # A stream may be collected in the midst of a round, which then goes on.
                if not (self._inside or self.generator.stepping):
                    self._alone(self._sweep)

    def _alone(self, work: Callable[[], None]) -> None:
        """Do something while no other thread does; not in the midst of such work, which waits for it."""
        with self._turn:
            if self._inside:
                raise InputError(
                    "A hook or a filter asks the LLM that waits for it: make another LLM for that, or ask "
                    "later."
                )
            try:
                self._inside = True
                work()
            finally:
                self._inside = False

    def _sweep(self) -> None:
        while self._left:
            job = self._left.popleft()
            self._inboxes.pop(job, None)
            self.generator.awaited.discard(job)
            self.generator.cancel(job)

    def _round(self) -> None:
        self._sweep()
        results = self.generator.results_of(self._inboxes)
        if not results and not (self.generator.num_active_jobs or self.generator.num_pending_jobs):
            raise InputError("The request was dropped before its end: the generator's queue was cleared.")
        for result in results:
            if result["stage"] == "streaming":
                self._inboxes[result["job"]].append(result)
