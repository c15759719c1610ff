"""Long queues: a bound if wanted, and thousands of waiting jobs that cost no more each than a few do."""

from __future__ import annotations

import random
import time

import pytest

from exlm import InputError, QueueFull
from exlm.generator.engine import EngineCore
from exlm.generator.job import Job
from tests.generator.test_engine import job, make_engine, run, streaming_results


def test_a_full_queue_refuses_and_goes_on() -> None:
    machine = make_engine(max_batch_size=1, max_queue=2)
    first, second, third = job("abc", 2), job("bcd", 2), job("cde", 2)
    machine.enqueue(first)
    machine.enqueue(second)
    with pytest.raises(QueueFull, match="2 jobs are waiting and max_queue is 2") as caught:
        machine.enqueue(third)
    assert isinstance(caught.value, InputError)
    machine.step()  # the first one starts, and leaves the queue
    machine.enqueue(third)
    with pytest.raises(QueueFull):
        machine.enqueue(job("def", 2))
    machine.cancel(second)
    machine.enqueue(fourth := job("def", 2))
    run(machine)
    assert [one.full_completion for one in (first, third, fourth)] == ["de", "fg", "gh"]


def test_no_bound_unless_asked_for() -> None:
    machine = make_engine(max_batch_size=1)
    for _ in range(300):
        machine.enqueue(job("a", 1))
    assert len(streaming_results(run(machine))) == 300


def _seconds(machine: EngineCore, jobs: list[Job], dice: random.Random) -> float:
    """CPU time to queue jobs, cancel half of them in any order, and run some rounds in between."""
    start = time.process_time()
    for one in jobs:
        machine.enqueue(one)
    for n, one in enumerate(dice.sample(jobs, len(jobs) // 2)):
        machine.cancel(one)
        if n % 100 == 0:
            machine.step()
    return time.process_time() - start


def test_thousands_of_jobs_take_no_quadratic_work() -> None:
    """Ten times the jobs take about ten times as long; a hundred times if each had to scan the queue."""
    dice = random.Random(5)
    per_job = []
    for count in (500, 5000):
        best = min(
            _seconds(
                make_engine(pages=4, max_batch_size=4),
                [job([2 + n % 26, 3], 600) for n in range(count)],
                dice,
            )
            for _ in range(2)
        )
        per_job.append(best / count)
    assert per_job[1] < 4 * per_job[0]


def test_cancelled_jobs_never_run_and_the_rest_do() -> None:
    dice = random.Random(7)
    machine = make_engine(pages=8, max_batch_size=8)
    jobs = [job([2 + n % 26], 1) for n in range(2000)]
    for one in jobs:
        machine.enqueue(one)
    gone = set(dice.sample(range(2000), 1000))
    for n in gone:
        machine.cancel(jobs[n])
    results = streaming_results(run(machine))
    assert [result["serial"] for result in results] == [n for n in range(2000) if n not in gone]
    assert all(jobs[n].is_finished and not jobs[n].full_completion for n in gone)
