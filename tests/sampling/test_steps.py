"""Each step after the softmax: the published numbers, and edge cases."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from exlm.sampling import Settings
from tests.sampling import oracle
from tests.sampling.final_probs import final_probabilities, from_probabilities
from tests.sampling.random_inputs import STEP_VALUES, WIDTHS, neutral, random_logits, random_settings

FIVE = [0.5, 0.3, 0.1, 0.06, 0.04]


@pytest.mark.parametrize(
    ("p", "changes", "expected"),
    [
        (FIVE, {"smoothing_factor": 0.2}, [0.3095, 0.2938, 0.1844, 0.1259, 0.0864]),
        (FIVE, {"temperature": 0.5}, [0.7038, 0.2534, 0.0282, 0.0101, 0.0045]),
        (FIVE, {"temperature": 0.5, "temperature_last": True}, [0.7038, 0.2534, 0.0282, 0.0101, 0.0045]),
        (FIVE, {"min_temp": 0.2, "max_temp": 1.5}, [0.4534, 0.2960, 0.1183, 0.0772, 0.0551]),
        (FIVE, {"mirostat": True, "mirostat_tau": 1.5}, [0.625, 0.375]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 0.5, "xtc_threshold": 0.15}, [0.2, 0.15, 0.4333, 0.2167]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.15}, [0, 0, 0.6667, 0.3333]),
        ([0.1, 0.2, 0.3, 0.4], {"xtc_probability": 1.0, "xtc_threshold": 0.15}, [0.3333, 0.6667, 0, 0]),
        ([0.7, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.5}, [0.7, 0.2, 0.1]),
        ([0.5, 0.5], {"xtc_probability": 1.0, "xtc_threshold": 0.1}, [0.0, 1.0]),
        (FIVE, {"top_k": 2}, [0.625, 0.375]),
        ([0.5, 0.3, 0.2], {"adaptive_target": 0.5}, [0.9292, 0.0646, 0.0063]),
        (FIVE, {"adaptive_target": 0.3}, [0.0586, 0.8436, 0.0586, 0.0241, 0.0151]),
        (FIVE, {"top_n_sigma": 1.0}, [0.625, 0.375]),
        (FIVE, {"top_n_sigma": 1.0, "temperature": 0.5}, [0.7353, 0.2647]),
    ],
)
def test_published_probabilities(p: list[float], changes: dict[str, Any], expected: list[float]) -> None:
    found = from_probabilities(p, **changes)
    expected += [0.0] * (len(p) - len(expected))
    assert [found.get(token, 0.0) for token in range(len(p))] == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("p", "changes", "kept"),
    [
        ([0.5, 0.4, 0.05, 0.05], {"top_p": 0.8}, {0, 1}),
        ([0.6, 0.25, 0.1, 0.04, 0.01], {"top_p": 0.8}, {0, 1}),
        ([0.3, 0.3, 0.2, 0.1, 0.1], {"top_p": 0.5}, {0, 1}),
        ([0.5, 0.3, 0.2], {"top_p": 0.8}, {0, 1}),
        ([0.1] * 10, {"top_p": 0.8}, set(range(8))),
        ([0.1, 0.1, 0.7, 0.1], {"top_p": 0.75}, {0, 2}),
        (FIVE, {"top_p": 1e-9}, {0}),
        (FIVE, {"top_n_sigma": 1.7}, {0, 1, 2}),
        (FIVE, {"top_n_sigma": 1e-9}, {0}),
        ([0.5, 0.5, 0.0], {"top_n_sigma": 1e-9}, {0, 1}),
        ([0.6, 0.4, 0.0, 0.0], {"top_n_sigma": 2.0}, {0, 1}),
        (FIVE, {"top_n_sigma": -1.0}, {0, 1, 2, 3, 4}),
        (FIVE, {"top_a": 0.3}, {0, 1, 2}),
        (FIVE, {"top_a": 100.0}, {0}),
        (FIVE, {"min_p": 0.12}, {0, 1, 2, 3}),
        (FIVE, {"min_p": 0.2}, {0, 1, 2}),
        (FIVE, {"tfs": 0.9}, {0, 1, 2}),
        (FIVE, {"tfs": 0.5}, {0, 1}),
        ([0.5, 0.5], {"tfs": 0.1}, {0, 1}),
        ([0.25] * 4, {"tfs": 0.5}, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], {"typical": 0.6}, {0, 1, 2}),
        ([0.4, 0.3, 0.2, 0.1], {"typical": 0.4}, {1, 2}),
        ([0.4, 0.3, 0.2, 0.1], {"typical": 0.3}, {1}),
        ([0.7, 0.1, 0.1, 0.05, 0.05], {"typical": 0.6}, {0}),
        ([0.9, 0.05, 0.05], {"typical": 0.05}, {0}),
        ([0.01] * 4 + [0.96], {"mirostat": True, "mirostat_tau": 0.01}, {4}),
        ([1.0, 0.0, 0.0], {"top_p": 0.5}, {0}),
    ],
)
def test_what_truncation_keeps(p: list[float], changes: dict[str, Any], kept: set[int]) -> None:
    assert set(from_probabilities(p, **changes)) == kept


def test_a_dynamic_temperature_near_zero_leaves_the_best() -> None:
    assert from_probabilities([0.999999, 1e-6], min_temp=0.0, max_temp=1.0, temp_exponent=5.0) == {0: 1.0}


def test_dynamic_temperature_comes_in_addition_to_temperature() -> None:
    once = from_probabilities(FIVE, min_temp=0.5, max_temp=1.5, temperature=0.5)
    wanted = oracle.dynamic_temperature(oracle.softmax(torch.tensor(FIVE).log().tolist(), 0.5, 0.0), 0.5, 1.5, 1.0)
    assert once == pytest.approx(wanted)
    last = from_probabilities(FIVE, min_temp=0.5, max_temp=1.5, temperature=0.5, temperature_last=True)
    assert last == pytest.approx(from_probabilities(FIVE, min_temp=0.5, max_temp=1.5))


def agrees_with_oracle(found: dict[int, float], x: list[float], settings: Settings) -> bool:
    """Whether probabilities are the oracle's, or those of a top-p within its tolerance."""
    for shift in (0.0, 3e-7, -3e-7):
        near = settings.clone()
        near.top_p = settings.top_p + (shift if 0 < settings.top_p < 1 else 0.0)
        wanted = oracle.distribution(x, near, ignored=settings.xtc_ignore_tokens or ())
        if all(abs(found.get(t, 0.0) - wanted.get(t, 0.0)) < 1e-6 for t in found.keys() | wanted.keys()):
            return True
    return False


@pytest.mark.parametrize("width", WIDTHS)
def test_any_mixture_of_steps_agrees_with_the_oracle(width: int) -> None:
    rng = Random(width)
    for _ in range(100):
        x, settings = random_logits(rng, 1, width), random_settings(rng, STEP_VALUES)
        (found,) = final_probabilities(x, [settings])
        assert sum(found.values()) == pytest.approx(1.0)
        assert agrees_with_oracle(found, x[0].tolist(), settings), settings


ALONE: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"smoothing_factor": 0.3},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_n_sigma": 1.5},
    {"top_a": 0.1},
    {"min_p": 0.05},
    {"tfs": 0.9},
    {"typical": 0.8},
    {"mirostat": True, "mirostat_tau": 4.0},
    {"min_temp": 0.3, "max_temp": 2.0, "temp_exponent": 0.7},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"temperature": 1.6, "temperature_last": True, "min_p": 0.02},
    {"adaptive_target": 0.4},
]


@pytest.mark.parametrize("changes", ALONE, ids=str)
def test_each_step_alone_on_a_thousand_rows(changes: dict[str, Any]) -> None:
    scales = torch.linspace(0.2, 5.0, 1000).unsqueeze(1)
    x = torch.randn(1000, 130, generator=torch.Generator().manual_seed(3)) * scales
    settings = neutral(**changes)
    for found, row in zip(final_probabilities(x, [settings] * len(x)), x.tolist(), strict=True):
        assert agrees_with_oracle(found, row, settings)


def test_a_large_vocabulary_is_reduced_without_loss() -> None:
    """Peaked, middling and flat rows: found among 64, 512 or 4096 tokens, or only among all."""
    x = torch.randn(4, 20000, generator=torch.Generator().manual_seed(4)) * torch.tensor([[6.0], [3.0], [1.0], [0.05]])
    for changes in ({"top_p": 0.9}, {"min_p": 0.05}, {"tfs": 0.9}, {"mirostat": True, "mirostat_tau": 3.0}):
        settings = neutral(**changes)
        for found, row in zip(final_probabilities(x, [settings] * 4), x.tolist(), strict=True):
            assert agrees_with_oracle(found, row, settings)
