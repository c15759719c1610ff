"""Results of jobs that no caller has read yet, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .job import Job
from .results import Result


class PendingResults:
    """Results of jobs that ran along while others were waited for."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self._jobs: set[Job] = set()  # whose they are

    def add(self, result: Result) -> None:
        """One more, for later."""
        self._results.append(result)
        self._jobs.add(result["job"])

    def take(self, jobs: Collection[Job]) -> list[Result]:
        """What became of these jobs."""
        few, many = (jobs, self._jobs) if len(jobs) < len(self._jobs) else (self._jobs, jobs)
        return self._take_matching(lambda job: job in jobs) if any([job in many for job in few]) else []

    def take_except(self, jobs: Collection[Job]) -> list[Result]:
        """What became of all but these jobs."""
        return self._take_matching(lambda job: job not in jobs) if self._results else []

    def num_finished(self, excluded: Collection[Job]) -> int:
        """How many ends of other jobs than these are not told yet."""
        return sum([result["eos"] and result["job"] not in excluded for result in self._results])

    def clear(self) -> None:
        """Forget all."""
        self._results, self._jobs = [], set()

    def _take_matching(self, wanted: Callable[[Job], bool]) -> list[Result]:
        taken = [result for result in self._results if wanted(result["job"])]
        self._results = [result for result in self._results if not wanted(result["job"])]
        self._jobs = {result["job"] for result in self._results}
        return taken
