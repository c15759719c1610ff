"""Intervals of ratios: they hold the truth as often as they say, and verdicts follow from them."""

from __future__ import annotations

import random

import pytest

from benchmarks.comparison import intervals
from benchmarks.comparison.intervals import Ratio, ratio, verdict


def test_equal_values_have_a_ratio_of_one() -> None:
    values = [3.0, 5.0, 4.0, 4.5, 3.5]
    assert ratio(values, values) == Ratio(1.0, 1.0, 1.0, 5)


def test_what_slows_both_values_of_a_round_down_cancels() -> None:
    base = [10.0, 17.0, 9.0, 30.0, 12.0, 11.0, 19.0]
    found = ratio(base, [1.1 * one for one in base])
    assert [found.value, found.low, found.high] == pytest.approx([1.1] * 3)


def test_the_value_is_the_ratio_of_the_medians_whatever_the_order() -> None:
    base, candidate = [1.0, 2.0, 4.0, 8.0, 100.0], [3.0, 2.0, 5.0, 1.0, 900.0]
    found, inverse = ratio(base, candidate), ratio(candidate, base)
    assert found.value == 3 / 4
    assert found.low < found.value < found.high
    assert inverse.value == pytest.approx(1 / found.value)
    assert ratio(base, candidate) == found


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 300)
    draw, covered, repeats = random.Random(3), 0, 400
    for seed in range(repeats):
        slow = [draw.gauss(1, 0.1) for _ in range(7)]
        base = [one * draw.gauss(1, 0.02) for one in slow]
        candidate = [1.03 * one * draw.gauss(1, 0.02) for one in slow]
        found = ratio(base, candidate, seed)
        covered += found.low <= 1.03 <= found.high
    assert 0.9 < covered / repeats < 0.99


@pytest.mark.parametrize(
    ("base", "candidate", "words"),
    [([1.0], [1.0, 2.0], "1 values .* 2"), ([], [], "0 values"), ([1.0], [0.0], "positive")],
)
def test_values_that_make_no_pairs_are_refused(base: list[float], candidate: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ratio(base, candidate)


@pytest.mark.parametrize(
    ("low", "high", "better", "expected"),
    [
        (0.98, 1.04, "lower", "within"),
        (0.98, 1.05, "lower", "within"),
        (0.5, 0.6, "lower", "within"),
        (1.04, 1.06, "lower", "undecided"),
        (0.9, 1.2, "lower", "undecided"),
        (1.06, 1.2, "lower", "outside"),
        (0.96, 1.02, "higher", "within"),
        (1.5, 1.6, "higher", "within"),
        (0.94, 0.96, "higher", "undecided"),
        (0.8, 1.1, "higher", "undecided"),
        (0.8, 0.94, "higher", "outside"),
    ],
)
def test_a_verdict_is_where_the_whole_interval_lies(low: float, high: float, better: str, expected: str) -> None:
    assert verdict(Ratio((low + high) / 2, low, high, 7), better, 0.05) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", range(1, intervals.MIN_ROUNDS))
def test_few_rounds_decide_nothing(rounds: int) -> None:
    assert verdict(Ratio(2.0, 2.0, 2.0, rounds), "lower", 0.05) == "undecided"
    assert verdict(Ratio(1.0, 1.0, 1.0, rounds), "lower", 0.05) == "undecided"
