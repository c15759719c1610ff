"""What is drawn has the distribution the oracle computes, by chi-square. Seeds are fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exlm.sampling import Sampler, SamplerState, SamplingRequest
from tests.sampling import oracle
from tests.sampling.random_inputs import neutral

MANY, ENOUGH, BATCH, WIDTH = 100_000, 20_000, 10_000, 100


def chi_square_limit(degrees: int) -> float:
    """What chi-square exceeds once in ten thousand times (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread + 3.719 * spread**0.5) ** 3)


def excess(counts: torch.Tensor, p: dict[int, float]) -> float:
    """Chi-square relative to its limit; tokens expected fewer than ten times are counted together."""
    draws = int(counts.sum())
    common = [token for token, chance in p.items() if chance * draws >= 10]
    rest = draws - int(counts[common].sum())
    rare = draws * (1.0 - sum(p[token] for token in common))
    assert counts.nonzero().flatten().tolist() == [t for t in counts.nonzero().flatten().tolist() if t in p]
    found = sum((float(counts[token]) - draws * p[token]) ** 2 / (draws * p[token]) for token in common)
    cells = len(common)
    if rare >= 10:
        found += (rest - rare) ** 2 / rare
        cells += 1
    return found / chi_square_limit(max(1, cells - 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
        {"temperature": 0.6},
        {},
        {"min_p": 0.05},
        {"top_p": 0.9, "temperature": 1.4},
        {"tfs": 0.95, "top_a": 0.05},
        {"typical": 0.7},
        {"top_n_sigma": 1.2, "temperature": 1.5},
        {"adaptive_target": 0.2, "top_k": 30},
        {"adaptive_target": 0.1},
        {"mirostat": True, "mirostat_tau": 3.0},
        {"min_temp": 0.4, "max_temp": 1.8},
        {"xtc_probability": 0.6, "xtc_threshold": 0.05},
        {"smoothing_factor": 0.2, "min_p": 0.02, "temperature": 1.5, "temperature_last": True},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(changes: dict[str, Any]) -> None:
    settings = neutral(**changes)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(5)) * 2.0
    sampler, counts = Sampler(), torch.zeros(WIDTH)
    for start in range(0, MANY if "top_k" in changes else ENOUGH, BATCH):
        rows = [SamplingRequest(settings, SamplerState(settings, 1000 + seed)) for seed in range(start, start + BATCH)]
        tokens = sampler.launch(x.expand(BATCH, -1), rows).tokens
        counts += tokens.bincount(minlength=WIDTH)
    assert excess(counts, oracle.distribution(x[0].tolist(), settings)) < 1.0


def test_one_text_follows_the_distribution_over_its_positions() -> None:
    settings = neutral(temperature=0.9)
    x = torch.randn(1, 30, generator=torch.Generator().manual_seed(6))
    sampler, counts = Sampler(), torch.zeros(30)
    state = SamplerState(settings, 42)
    for _ in range(4000):
        (token,) = sampler.sample_batch(x, [SamplingRequest(settings, state)]).tokens
        counts[token] += 1
        state.accept(token)
    assert excess(counts, oracle.distribution(x[0].tolist(), settings)) < 1.0


@pytest.mark.parametrize(("skew", "likelier"), [(1.0, False), (-1.0, True)])
def test_skew_favours_or_avoids_unlikely_tokens(skew: float, likelier: bool) -> None:
    """u^exp(-skew) along descending probabilities: the share of the first token is p^exp(skew)."""
    settings = neutral(skew=skew)
    x = torch.tensor([[0.1, 0.6, 0.3]]).log()
    rows = [SamplingRequest(settings, SamplerState(settings, seed)) for seed in range(20_000)]
    counts = Sampler().launch(x.expand(20_000, -1), rows).tokens.bincount(minlength=3)
    power = float(torch.tensor(skew).exp())
    p = {1: 0.6**power, 2: 0.9**power - 0.6**power, 0: 1.0 - 0.9**power}
    assert (p[1] > 0.6) == likelier
    assert excess(counts.float(), p) < 1.0
