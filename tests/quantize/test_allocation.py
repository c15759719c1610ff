"""Bit allocation: never over the budget, deterministic, near the optimum."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exlm.errors import InputError
from exlm.quantize.allocation import Candidate, lower_hull, minimize_bits, minimize_kl

numbers = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 10)), min_size=1, max_size=4)
raw_sets = st.lists(numbers, min_size=1, max_size=4)


def make_candidate_sets(raw: list[list[tuple[int, float]]]) -> list[list[Candidate]]:
    return [[Candidate(bits, max_kl, {}) for bits, max_kl in candidates] for candidates in raw]


@given(raw_sets, st.integers(1, 250))
def test_the_budget_is_kept_and_the_optimum_is_near(raw: list[list[tuple[int, float]]], budget: int) -> None:
    candidate_sets = make_candidate_sets(raw)
    least = sum(min(c.bits for c in candidates) for candidates in candidate_sets)
    if least > budget:
        with pytest.raises(InputError, match="cannot be reached"):
            minimize_kl(candidate_sets, budget, 100)
        return
    found = minimize_kl(candidate_sets, budget, 100)
    assert found.bits <= budget
    every = [c for c in product(*candidate_sets) if sum(one.bits for one in c) <= budget]
    best = min(sum(one.kl_cost for one in c) for c in every)
    widest = max(
        (a.kl_cost - b.kl_cost for candidates in candidate_sets for a, b in pairwise(lower_hull(candidates))),
        default=0,
    )
    assert found.kl_cost <= best + widest * len(candidate_sets) + 1e-9
    assert minimize_kl(candidate_sets, budget, 100) == found


def test_many_sets_come_close_to_the_lagrange_bound() -> None:
    random.seed(3)
    candidate_sets = [
        [Candidate(b * 100 + random.randrange(9), 4.0**-b * random.random(), {}) for b in range(2, 9)]
        for _ in range(60)
    ]
    found = minimize_kl(candidate_sets, 60 * 400, 1)
    assert found.bits > 60 * 400 - 100
    hulls = [lower_hull(candidates) for candidates in candidate_sets]
    prices = sorted((a.kl_cost - b.kl_cost) / (b.bits - a.bits) for one in hulls for a, b in pairwise(one))
    bound = max(  # Lagrange: no allocation within the budget can be better
        sum(min(c.kl_cost + price * c.bits for c in candidates) for candidates in candidate_sets) - price * 60 * 400
        for price in prices
    )
    assert found.kl_cost <= 1.02 * bound


@given(raw_sets, st.floats(0, 30))
@example([[(1, 2.0), (2, 1e-9)]], 0.0)
def test_the_kl_cost_is_kept_below_the_limit(raw: list[list[tuple[int, float]]], max_kl: float) -> None:
    candidate_sets = make_candidate_sets(raw)
    if sum(min(c.kl_cost for c in candidates) for candidates in candidate_sets) > max_kl + 1e-9:
        with pytest.raises(InputError, match="cannot be reached"):
            minimize_bits(candidate_sets, max_kl)
        return
    assert minimize_bits(candidate_sets, max_kl + 1e-9).kl_cost <= max_kl + 1e-6
