"""A job gives the same results as alone, whatever else happens in its engine."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import Tokenizer
from tests.generator.engine_fuzz import EngineFuzz, SpecsWithResults, random_job_spec, run_alone
from tests.generator.scripted import make_tokenizer

RUNS, STEPS, SPECS = 90, 300, 120


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def specs(tokenizer: Tokenizer) -> SpecsWithResults:
    """Requests of all kinds, each with its results when it runs alone."""
    rng = Random(7)
    recipes = [random_job_spec(rng, tokenizer) for _ in range(SPECS)]
    return [(recipe, run_alone(recipe, tokenizer)) for recipe in recipes]


def run_fuzz(
    rng: Random, steps: int, tokenizer: Tokenizer, specs: SpecsWithResults, recurrent: bool = False
) -> Counter[str]:
    walk = EngineFuzz(rng, tokenizer, specs, recurrent=recurrent)
    for _ in range(steps):
        walk.step()
    walk.drain()
    return walk.counts


def test_many_engines(tokenizer: Tokenizer, specs: SpecsWithResults) -> None:
    events: Counter[str] = Counter()
    for seed in range(RUNS):
        events += run_fuzz(Random(seed), STEPS, tokenizer, specs)
    at_least = {
        "rounds": 20_000,
        "finished": 3000,
        "reused": 1000,
        "rewinds": 500,
        "cancels": 1000,
        "guesses": 1000,
        "too large": 200,
        "error": 200,
        "max_new_tokens": 1000,
        "stop_token": 200,
        "end_filter": 100,
        "stop_string": 50,
    }
    assert {key: events[key] for key in at_least if events[key] < at_least[key]} == {}, events


def test_many_engines_with_recurrent_states(tokenizer: Tokenizer, specs: SpecsWithResults) -> None:
    events: Counter[str] = Counter()
    for seed in range(RUNS):
        events += run_fuzz(Random(seed), STEPS, tokenizer, specs, recurrent=True)
    at_least = {"rounds": 20_000, "finished": 3000, "reused": 300, "rewinds": 500, "cancels": 1000, "guesses": 500}
    assert {key: events[key] for key in at_least if events[key] < at_least[key]} == {}, events


@settings(max_examples=12)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 30))
def test_engines_hypothesis(tokenizer: Tokenizer, specs: SpecsWithResults, rng: Random, steps: int) -> None:
    run_fuzz(rng, steps, tokenizer, specs)
