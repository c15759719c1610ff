"""Random operations: the page table stays consistent and no sequence reads rows of another."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generator.scheduler_fuzz import SchedulerFuzz

WALKS, STEPS = 240, 100


def run_fuzz(rng: Random, steps: int, page_size: int = 4) -> Counter[str]:
    fuzz = SchedulerFuzz(rng, page_size)
    for _ in range(steps):
        fuzz.step()
    fuzz.drain()
    return fuzz.counts


def test_many_runs() -> None:
    events: Counter[str] = Counter()
    for seed in range(WALKS):
        events += run_fuzz(Random(seed), STEPS)
    assert events["steps"] >= 20_000
    at_least = {
        "started": 4000,
        "finished": 2000,
        "cancels": 1000,
        "failures": 50,
        "reused": 1000,
        "copies": 1000,
        "overtaken": 200,
        "rewinds": 1000,
        "page rewinds": 300,
        "too large": 200,
        "switches": 80,
        "rows kept in place": 80,
    }
    assert {key: events[key] for key in at_least if events[key] < at_least[key]} == {}, events


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_other_page_sizes(page_size: int) -> None:
    for seed in range(12):
        run_fuzz(Random(1000 * page_size + seed), 60, page_size)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_runs_hypothesis(rng: Random, steps: int) -> None:
    run_fuzz(rng, steps)
