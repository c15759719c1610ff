"""Two thousand jobs in one process, many of them bad: memory stays flat, and good jobs are unaffected."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from exlm import CacheTooSmall, Generator, InputError, Job, Tokenizer
from tests.generator.engine_fuzz import ResultChecker, Scripted, random_job_spec, run_alone, script
from tests.generator.scripted import ScriptedCache, ScriptedModel, make_job, make_tokenizer

JOBS, WARMUP_JOBS, TRACED_JOBS, SPECS = 2000, 200, 300, 120


class Model(ScriptedModel):
    """The fuzzed model as a generator's model."""

    def runner(self, cache: ScriptedCache) -> Scripted:
        return Scripted(script, cache.max_seq_len // 256)


BAD: list[tuple[Callable[[], Job], type[Exception]]] = [
    (lambda: make_job("abc", 5000), CacheTooSmall),
    (lambda: make_job("abc" * 1500, 200), CacheTooSmall),
    (lambda: make_job("abc", 9000), InputError),
    (lambda: make_job("abc", 9, stop_conditions=[99]), InputError),
    (lambda: make_job("abc", 9, filters=[object()]), InputError),
    (lambda: make_job("abc", 0), InputError),
    (lambda: make_job("abc", 9, banned_strings=["x"], filters=[object()]), InputError),
]


class Memory(NamedTuple):
    """The memory of the process while the queue is empty."""

    own: int
    objects: int
    traced: int


def memory() -> Memory:
    gc.collect()
    return Memory(own_bytes(), len(gc.get_objects()), tracemalloc.get_traced_memory()[0])


def own_bytes() -> int:
    """Private memory of the process, resident or swapped, without mapped files; 0 where it is unknown."""
    status = Path("/proc/self/status")
    lines = [line.split() for line in status.read_text().splitlines()] if status.exists() else []
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "VmSwap:"))


class Soak:
    """One generator with valid, invalid and cancelled jobs."""

    def __init__(self, texts: Tokenizer) -> None:
        self.rng, self.checker = Random(3), ResultChecker()
        recipes = [random_job_spec(self.rng, texts, prefix_lengths=(0, 3, 20, 60, 300)) for _ in range(SPECS)]
        self.specs = [(recipe, run_alone(recipe, texts)) for recipe in recipes]
        self.generator = Generator(Model(max_seq_len=8192), ScriptedCache(16 * 256), texts, max_batch_size=24)

    def jobs(self, count: int) -> None:
        """Run `count` more jobs to the end."""
        for _ in range(count):
            if self.rng.random() < 0.1:
                self.enqueue_bad()
            else:
                recipe, expected = self.rng.choice(self.specs)
                job = recipe.job()
                self.generator.enqueue(job)
                self.checker.expect(job, expected)
            if self.rng.random() < 0.1 and self.checker.expected:
                self.cancel()
            while self.generator.num_remaining_jobs() > 60:
                self.checker.check(self.generator.iterate())
        while self.generator.num_remaining_jobs():
            self.checker.check(self.generator.iterate())
        assert not self.checker.expected

    def enqueue_bad(self) -> None:
        make, error = self.rng.choice(BAD)
        before = self.generator.num_remaining_jobs()
        with pytest.raises(error):
            self.generator.enqueue(make())
        assert self.generator.num_remaining_jobs() == before
        self.checker.counts["refused"] += 1

    def cancel(self) -> None:
        victim, _, _ = self.checker.expected[self.rng.choice(list(self.checker.expected))]
        self.generator.cancel(victim)
        self.checker.drop(victim)


def test_two_thousand_jobs(tmp_path: Path) -> None:
    """Runs in a new process: reuse of memory that other tests have freed would look like a leak."""
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(run_soak, tmp_path).result()


def run_soak(tmp_path: Path) -> None:
    """Measure the process first, then Python's allocations, since tracing costs memory and time itself."""
    soak = Soak(make_tokenizer(tmp_path / "toy"))
    soak.jobs(WARMUP_JOBS)
    before = memory()
    soak.jobs(JOBS - WARMUP_JOBS - TRACED_JOBS)
    after = memory()
    assert after.objects - before.objects < 500
    assert after.own - before.own < 10_000_000
    tracemalloc.start()
    try:
        soak.jobs(TRACED_JOBS)
        assert memory().traced < 200_000
    finally:
        tracemalloc.stop()
    events = soak.checker.counts
    assert events["finished"] + events["cancels"] + events["refused"] == JOBS
    at_least = {"finished": 1400, "cancels": 100, "refused": 150, "error": 150, "reused": 500, "rewinds": 100}
    assert {key: events[key] for key in at_least if events[key] < at_least[key]} == {}, events
