"""Turns: several callers on one generator, each of whom receives what becomes of its own jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Pieces

from ..errors import InputError
from ..generator import Generator, Job, StreamingResult
from .outputs import Completion, completion_from_result, token_ids_of_result


class RequestRouter:
    """Runs jobs to their ends; calls may be nested, and may come from several threads."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._result_queues: dict[Job, deque[StreamingResult]] = {}
        self._jobs_to_drop: deque[Job] = deque()  # done with, or let go of: to be dropped between two rounds
        self._lock = generator.lock  # the same: with two, each could be held by who waits for the other
        self._working = False  # the thread that holds the lock is at work

    def run_to_end(self, jobs: Sequence[Job]) -> list[Completion]:
        """Run these jobs in one batch; returns when all are done."""
        tokens: dict[Job, list[int]] = {job: [] for job in jobs}
        last: dict[Job, StreamingResult] = {}
        for result in self._iterate_results(jobs):
            last[result["job"]] = result
            tokens[result["job"]] += token_ids_of_result(result)
        return [completion_from_result(last[job], tokens[job]) for job in jobs]

    def stream_text(self, job: Job) -> Pieces[str, None, Completion]:
        """The text of a job as it comes, then the whole; a job whose iterator is dropped is cancelled."""
        tokens: list[int] = []
        for result in self._iterate_results([job]):
            tokens += token_ids_of_result(result)
            if text := result.get("text"):
                yield text
        return completion_from_result(result, tokens)

    def close(self) -> None:
        """Drop every job, also those that other threads wait for."""
        self._exclusively(self.generator.clear_queue)

    def _iterate_results(self, jobs: Sequence[Job]) -> Iterator[StreamingResult]:
        """What becomes of these jobs until all are done; what becomes of others is kept for their callers."""
        queue: deque[StreamingResult] = deque()
        num_unfinished = len(jobs)

        def enqueue_jobs() -> None:
            for job in jobs:
                self._result_queues[job] = queue
                self.generator.awaited_jobs.add(job)
                self.generator.enqueue(job)

        def step_if_empty() -> None:
            if not queue:
                self._step()

        try:
            self._exclusively(enqueue_jobs)
            while num_unfinished:
                self._exclusively(step_if_empty)
                while queue:
                    result = queue.popleft()
                    if "error" in result:
                        raise result["error"]
                    num_unfinished -= result["eos"]
                    yield result
        finally:
            self._jobs_to_drop.extend(jobs)
            with self._lock:
                # A stream may be collected in the midst of a round, which then goes on.
                if not (self._working or self.generator.in_step):
                    self._exclusively(self._drop_jobs)

    def _exclusively(self, work: Callable[[], None]) -> None:
        """Do something while no other thread does; not in the midst of such work, which waits for it."""
        with self._lock:
            if self._working:
                raise InputError(
                    "A hook or a filter asks the LLM that waits for it: make another LLM for that, or ask "
                    "later."
                )
            try:
                self._working = True
                work()
            finally:
                self._working = False

    def _drop_jobs(self) -> None:
        while self._jobs_to_drop:
            job = self._jobs_to_drop.popleft()
            self._result_queues.pop(job, None)
            self.generator.awaited_jobs.discard(job)
            self.generator.cancel(job)

    def _step(self) -> None:
        self._drop_jobs()
        results = self.generator.iterate_for(self._result_queues)
        if not results and not (self.generator.num_active_jobs or self.generator.num_pending_jobs):
            raise InputError("The request was dropped before its end: the generator's queue was cleared.")
        for result in results:
            if result["stage"] == "streaming":
                self._result_queues[result["job"]].append(result)
