"""Two thousand jobs in one process, many of them bad: memory stays flat, and the good ones never notice."""

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
from tests.generator.scripted import ScriptedCache, ScriptedModel, job, make_tokenizer

JOBS, WARMUP_JOBS, TRACED_JOBS, SPECS = 2000, 200, 300, 120


class Model(ScriptedModel):
    """The walk's model, as a generator takes it."""

    def runner(self, cache: ScriptedCache) -> Scripted:
        return Scripted(script, cache.max_seq_len // 256)


BAD: list[tuple[Callable[[], Job], type[Exception]]] = [
    (lambda: job("abc", 5000), CacheTooSmall),
    (lambda: job("abc" * 1500, 200), CacheTooSmall),
    (lambda: job("abc", 9000), InputError),
    (lambda: job("abc", 9, stop_conditions=[99]), InputError),
    (lambda: job("abc", 9, filters=[object()]), InputError),
    (lambda: job("abc", 0), InputError),
    (lambda: job("abc", 9, banned_strings=["x"], filters=[object()]), InputError),
]


class Memory(NamedTuple):
    """What the process holds when nothing is queued."""

    own: int
    objects: int
    traced: int


def memory() -> Memory:
    gc.collect()
    return Memory(own_bytes(), len(gc.get_objects()), tracemalloc.get_traced_memory()[0])


def own_bytes() -> int:
    """Memory that is the process's own, in place or swapped out; mapped files come and go. 0 if not told."""
    status = Path("/proc/self/status")
    lines = [line.split() for line in status.read_text().splitlines()] if status.exists() else []
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "VmSwap:"))


class Soak:
    """One generator, and users who do not care."""

    def __init__(self, texts: Tokenizer) -> None:
        self.dice, self.checker = Random(3), ResultChecker()
        recipes = [random_job_spec(self.dice, texts, prefix_lengths=(0, 3, 20, 60, 300)) for _ in range(SPECS)]
        self.specs = [(recipe, run_alone(recipe, texts)) for recipe in recipes]
        self.machine = Generator(Model(max_seq_len=8192), ScriptedCache(16 * 256), texts, max_batch_size=24)

    def jobs(self, count: int) -> None:
        """So many more jobs; at the end nothing is queued."""
        for _ in range(count):
            if self.dice.random() < 0.1:
                self.enqueue_bad()
            else:
                recipe, wanted = self.dice.choice(self.specs)
                good = recipe.job()
                self.machine.enqueue(good)
                self.checker.expect(good, wanted)
            if self.dice.random() < 0.1 and self.checker.expected:
                self.cancel()
            while self.machine.num_remaining_jobs() > 60:
                self.checker.check(self.machine.iterate())
        while self.machine.num_remaining_jobs():
            self.checker.check(self.machine.iterate())
        assert not self.checker.expected

    def enqueue_bad(self) -> None:
        make, error = self.dice.choice(BAD)
        before = self.machine.num_remaining_jobs()
        with pytest.raises(error):
            self.machine.enqueue(make())
        assert self.machine.num_remaining_jobs() == before
        self.checker.counts["refused"] += 1

    def cancel(self) -> None:
        victim, _, _ = self.checker.expected[self.dice.choice(list(self.checker.expected))]
        self.machine.cancel(victim)
        self.checker.drop(victim)


def test_two_thousand_jobs(tmp_path: Path) -> None:
    """In a process of its own: taking up what other tests have left free in this one looks like a leak."""
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(run_soak, tmp_path).result()


def run_soak(tmp_path: Path) -> None:
    """The process first, then, since tracing costs memory and time itself, what Python allocated."""
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
    seen = soak.checker.counts
    assert seen["finished"] + seen["cancels"] + seen["refused"] == JOBS
    at_least = {"finished": 1400, "cancels": 100, "refused": 150, "error": 150, "reused": 500, "rewinds": 100}
    assert {key: seen[key] for key in at_least if seen[key] < at_least[key]} == {}, seen
