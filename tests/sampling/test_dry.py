"""DRY: the published numbers, runs and long matches, and the index against a search at every position."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.sampling.penalties import DryIndex, DryRule
from tests.sampling import oracle
from tests.sampling.random_inputs import neutral

A, B, C, D, X = range(5)


def costs(context: list[int], **changes: Any) -> dict[int, float]:
    settings = neutral(dry_multiplier=1.0, **changes)
    index = DryIndex()
    index.extend(context)
    rule = settings.compiled().dry_rule
    assert rule is not None
    return index.token_penalties(rule, rule.breaker_ids or (), 1000)


def test_published_numbers() -> None:
    assert costs([A, B, C, X, A, B]) == {C: 1.0}
    assert costs([A, B, C, D, X, A, B, C]) == {D: 1.75}
    assert costs([A, B, C, X, A, B, C, X, A, B, D, X, A, B], dry_max_ngram=2) == {C: 2.0, D: 1.0}
    assert costs([*range(100, 117), D, X, *range(100, 117)])[D] == pytest.approx(4421.5, abs=0.5)


def test_every_occurrence_of_the_longest_match_counts() -> None:
    text = [A, B, C, X, 9, A, B, C, X, 8, A, B, D, X, 7, A, B]
    assert costs(text) == {C: 2.0, D: 1.0}


def test_repeated_tokens_and_matches_of_any_length_are_penalised() -> None:
    assert costs([A, A, A, A]) == {A: 1.75}
    cycle = [11, 12, 13, 14, 15] * 8
    assert costs(cycle) == {11: pytest.approx(1.75**18 * 4)}
    assert costs([A, A]) == {}
    assert costs([A]) == costs([]) == {}


def test_breakers_and_out_of_vocab_ids_end_a_match() -> None:
    assert costs([A, B, C, X, A, B], dry_sequence_breakers=frozenset({B})) == {}
    assert costs([A, B, C, X, A, B], dry_sequence_breakers=frozenset({C})) == {}
    assert costs([D, A, B, C, X, D, A, B], dry_sequence_breakers=frozenset({D})) == {C: 1.0}
    assert costs([A, 10**9, C, X, A, 10**9]) == {}


def test_any_range_works() -> None:
    text = [A, B, C, X, A, B]
    assert costs(text, dry_range=6) == {C: 1.0}
    assert costs(text, dry_range=5) == {}
    for short in range(1, 5):
        assert costs([A], dry_range=short) == {}


def test_penalties_stay_finite() -> None:
    rule = DryRule(1.0, 10.0, 0, 5000, 0, frozenset())
    assert rule.penalty(4000) == 1e30


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(0, 4),
    st.sampled_from((1, 2, 5, 20)),
    st.sampled_from((0, 1, 2, 10, 30)),
    st.frozensets(st.integers(0, 3), max_size=2),
)
def test_index_agrees_with_the_oracle(
    context: list[int], allowed: int, longest: int, window: int, breakers: frozenset[int]
) -> None:
    changes = {"dry_allowed_length": allowed, "dry_max_ngram": longest, "dry_range": window}
    settings = neutral(dry_multiplier=1.0, dry_sequence_breakers=breakers, **changes)
    wanted = oracle.dry_penalties(context, settings, breakers, 1000)
    assert costs(context, dry_sequence_breakers=breakers, **changes) == pytest.approx(wanted)


@given(st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 20)), max_size=20))
def test_the_index_is_exact_after_appends_and_truncations(changes: list[list[int] | int]) -> None:
    index, text = DryIndex(), list[int]()
    rules = [DryRule(1.0, 1.75, 2, 20, 0, None), DryRule(1.0, 1.75, 0, 3, 4, None)]
    for change in changes:
        if isinstance(change, int):
            index.truncate(change)
            del text[change:]
        else:
            index.extend(change)
            text += change
        fresh = DryIndex()
        fresh.extend(text)
        assert len(index) == len(text)
        for rule in rules if len(text) % 3 else rules[1:]:
            assert index.token_penalties(rule, (), 10) == fresh.token_penalties(rule, (), 10)


def test_a_long_repetitive_text_is_quick() -> None:
    index = DryIndex()
    index.extend([1, 2, 3, 4] * 5000)
    rule = DryRule(0.8, 1.75, 2, 20, 0, frozenset())
    start = time.perf_counter()
    for token in [1, 2, 3, 4] * 5:
        index.extend([token])
        assert index.token_penalties(rule, (), 10)
    assert time.perf_counter() - start < 1.0
    index.truncate(20000)
    assert set(index.token_penalties(rule, (), 10)) == {1}
