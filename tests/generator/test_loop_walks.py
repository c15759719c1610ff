"""Whatever happens on a machine, a job says what it says alone."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import Tokenizer
from tests.generator.loop_walk import Cookbook, LoopWalk, alone, random_recipe
from tests.generator.scripted import tokenizer

LIVES, STEPS, RECIPES = 90, 300, 120


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cookbook(texts: Tokenizer) -> Cookbook:
    """Requests of all kinds, and what each gives alone."""
    dice = Random(7)
    recipes = [random_recipe(dice, texts) for _ in range(RECIPES)]
    return [(recipe, alone(recipe, texts)) for recipe in recipes]


def live(dice: Random, steps: int, texts: Tokenizer, cookbook: Cookbook) -> Counter[str]:
    walk = LoopWalk(dice, texts, cookbook)
    for _ in range(steps):
        walk.step()
    walk.drain()
    return walk.seen


def test_many_machines(texts: Tokenizer, cookbook: Cookbook) -> None:
    seen: Counter[str] = Counter()
    for seed in range(LIVES):
        seen += live(Random(seed), STEPS, texts, cookbook)
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
    assert {key: seen[key] for key in at_least if seen[key] < at_least[key]} == {}, seen


@settings(max_examples=12)
@given(dice=st.randoms(use_true_random=False), steps=st.integers(1, 30))
def test_machines_that_shrink(texts: Tokenizer, cookbook: Cookbook, dice: Random, steps: int) -> None:
    live(dice, steps, texts, cookbook)
