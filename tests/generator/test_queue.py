"""Long queues: `max_queue`, and thousands of waiting jobs with the same cost per job as a few."""

from __future__ import annotations

import gc
import random
from functools import partial

import pytest

from exlm import InputError, QueueFull
from exlm.generator.engine import EngineCore
from exlm.generator.job import Job
from tests.generator.counting import cpu_seconds
from tests.generator.test_engine import make_engine, make_job, run, streaming_results


def test_a_full_queue_refuses_and_goes_on() -> None:
    engine = make_engine(max_batch_size=1, max_queue=2)
    first, second, third = make_job("abc", 2), make_job("bcd", 2), make_job("cde", 2)
    engine.enqueue(first)
    engine.enqueue(second)
    with pytest.raises(QueueFull, match="2 jobs are waiting and max_queue is 2") as caught:
        engine.enqueue(third)
    assert isinstance(caught.value, InputError)
    engine.step()  # the first one starts, and leaves the queue
    engine.enqueue(third)
    with pytest.raises(QueueFull):
        engine.enqueue(make_job("def", 2))
    engine.cancel(second)
    engine.enqueue(fourth := make_job("def", 2))
    run(engine)
    assert [job.full_completion for job in (first, third, fourth)] == ["de", "fg", "gh"]


def test_the_queue_is_unbounded_by_default() -> None:
    engine = make_engine(max_batch_size=1)
    for _ in range(300):
        engine.enqueue(make_job("a", 1))
    assert len(streaming_results(run(engine))) == 300


def enqueue_and_cancel(engine: EngineCore, jobs: list[Job], rng: random.Random) -> None:
    """Enqueue jobs, cancel half of them in random order, and run some steps in between."""
    for job in jobs:
        engine.enqueue(job)
    for n, job in enumerate(rng.sample(jobs, len(jobs) // 2)):
        engine.cancel(job)
        if n % 100 == 0:
            engine.step()


def test_thousands_of_jobs_take_no_quadratic_work() -> None:
    """Ten times the jobs take about ten times as long; a hundred times if each had to scan the queue."""
    rng = random.Random(5)
    per_job = []
    for count in (500, 5000):
        seconds = []
        for _ in range(2):
            engine = make_engine(pages=4, max_batch_size=4)
            jobs = [make_job([2 + n % 26, 3], 600) for n in range(count)]
            seconds.append(cpu_seconds(partial(enqueue_and_cancel, engine, jobs, rng)))
        per_job.append(min(seconds) / count)
    assert per_job[1] < 4 * per_job[0]


def test_a_waiting_job_holds_few_objects_that_the_garbage_collector_visits() -> None:
    """A full collection visits all of them: two more lists in each job once made enqueueing 10,000 three times as slow.

    Nine are a job's own and four its settings'. Tuples of numbers do not count: collections stop visiting them.
    """
    engine = make_engine()
    engine.enqueue(make_job([2, 3], 600))  # what the first job alone creates
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects(generation=2))
        jobs = [make_job([2 + n % 26, 3], 600) for n in range(100)]
        for job in jobs:
            engine.enqueue(job)
        gc.collect()
        gc.collect()  # the first one released the inner tuples of prompts, this one the outer ones
        assert len(gc.get_objects(generation=2)) - before < 100 * (9 + 4 + 1)
    finally:
        gc.enable()


def test_cancelled_jobs_never_run_and_the_rest_do() -> None:
    rng = random.Random(7)
    engine = make_engine(pages=8, max_batch_size=8)
    jobs = [make_job([2 + n % 26], 1) for n in range(2000)]
    for job in jobs:
        engine.enqueue(job)
    cancelled = set(rng.sample(range(2000), 1000))
    for n in cancelled:
        engine.cancel(jobs[n])
    results = streaming_results(run(engine))
    assert [result["serial"] for result in results] == [n for n in range(2000) if n not in cancelled]
    assert all(jobs[n].is_finished and not jobs[n].full_completion for n in cancelled)
