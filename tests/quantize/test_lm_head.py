"""Clusters of the head's columns, their statistics, and the loss of the solved head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.formats import DenseWeight
from exlm.quantize.allocation import make_recipe
from exlm.quantize.gptq import factorize
from exlm.quantize.layer_loader import HookedLinear, make_batch
from exlm.quantize.layer_solver import (
    MAX_CLUSTERS,
    MAX_HESSIAN_BYTES,
    HessianAccumulator,
    HiddenStates,
    accumulate_clusters,
    cluster_columns,
    cluster_count,
    cluster_token_weights,
    solve_head,
)
from exlm.quantize.matrix_solver import solve_exl2
from exlm.quantize.options import SolverOptions

TOKENS, WIDTH, COLUMNS, CLUSTERS = 4096, 32, 48, 3


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_every_column_is_in_one_cluster(columns: int, inputs: int, count: int, seed: int) -> None:
    count = min(count, columns)
    matrix = torch.randn(columns, inputs, generator=torch.Generator().manual_seed(seed))
    membership = cluster_columns(matrix, count, seed)
    assert membership.shape == (columns, count)
    assert torch.equal(membership.sum(1), torch.ones(columns))
    assert torch.equal(membership, cluster_columns(matrix, count, seed))


def test_columns_of_similar_direction_share_a_cluster() -> None:
    generator = torch.Generator().manual_seed(5)
    ways = torch.nn.functional.normalize(torch.randn(CLUSTERS, WIDTH, generator=generator), dim=1)
    own = torch.arange(COLUMNS) % CLUSTERS
    lengths = torch.rand(COLUMNS, 1, generator=generator) * 9 + 0.1
    matrix = lengths * (ways[own] + 0.02 * torch.randn(COLUMNS, WIDTH, generator=generator))
    found = next(
        cluster_columns(matrix, CLUSTERS, seed)
        for seed in range(9)
        if len(set(_initial_centres(seed) % CLUSTERS)) == CLUSTERS
    )
    together = found @ found.T > 0
    assert torch.equal(together, own[:, None] == own)


def _initial_centres(seed: int) -> Any:
    return torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(seed))[:CLUSTERS].numpy()


def test_wide_models_have_fewer_clusters() -> None:
    assert cluster_count(576, 49152) == MAX_CLUSTERS
    assert 1 < cluster_count(4096, 128000) < MAX_CLUSTERS
    assert cluster_count(4096, 128000) * 8 * 4096**2 <= MAX_HESSIAN_BYTES
    assert cluster_count(16384, 128000) == cluster_count(64, 7) == 1


def test_token_weights_are_the_sum_of_p_times_one_minus_p() -> None:
    probs = torch.randn(2, 3, 8).softmax(-1)
    membership = torch.eye(2)[torch.arange(8) % 2]
    slow = [sum(float(p) * (1 - float(p)) for p in row[cluster::2]) for row in probs.view(6, 8) for cluster in (0, 1)]
    torch.testing.assert_close(cluster_token_weights(probs, membership).flatten(), torch.tensor(slow))


class ClusteredHead:
    """A head and clustered tokens whose inputs differ; each cluster of columns matters for one of them."""

    def __init__(self, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randn(COLUMNS, WIDTH, generator=generator)
        self.membership = torch.eye(CLUSTERS)[torch.arange(COLUMNS) % CLUSTERS]
        cluster = torch.arange(TOKENS) % CLUSTERS
        mixing = torch.randn(CLUSTERS, WIDTH, WIDTH, generator=generator)
        x = torch.bmm(torch.randn(TOKENS, 1, WIDTH, generator=generator), mixing[cluster])[:, 0]
        rounded = x + noise * torch.tanh(x.roll(1, -1))
        self.token_weights = torch.eye(CLUSTERS)[cluster] + 0.01 * torch.rand(TOKENS, CLUSTERS, generator=generator)
        self.x, self.rounded = x, rounded
        batch = make_batch(torch.zeros(2, TOKENS // 2, dtype=torch.long))
        shape = (2, TOKENS // 2, WIDTH)
        self.states = HiddenStates([x.view(shape)], [rounded.view(shape)], [batch])

    def accumulate(self) -> tuple[HessianAccumulator, list[HessianAccumulator]]:
        linear = HookedLinear(DenseWeight(self.matrix, None))
        return accumulate_clusters(linear, lambda x, batch: linear(x), self.states, self.token_weights)

    def weighted_loss(self, solution: Tensor) -> float:
        """Squared errors of the logits, weighted by the tokens' weights for each column's cluster."""
        off = (self.x @ self.matrix.T - self.rounded @ solution).square()
        return float((off * (self.token_weights @ self.membership.T)).sum())


@pytest.mark.parametrize("seed", range(3))
def test_each_cluster_is_corrected_for_its_own_tokens(seed: int) -> None:
    head = ClusteredHead(seed, 0.1)
    overall, clusters = head.accumulate()
    exact = head.matrix.T.contiguous()
    together = overall.mean().correct_weights(exact, 1e-6)
    for cluster, accumulator in enumerate(clusters):
        columns = head.membership[:, cluster].nonzero()[:, 0]
        means, weight = accumulator.mean(), head.token_weights[:, cluster]
        torch.testing.assert_close(
            means.effective_tokens, float(weight.sum() ** 2 / weight.square().sum()), rtol=1e-4, atol=0
        )
        corrected = means.correct_columns(exact[:, columns], together[:, columns], 1e-6)
        inputs, wanted = head.rounded, head.x @ exact[:, columns]
        covariance = (inputs * weight[:, None]).T @ inputs / weight.sum()
        left = (inputs * weight[:, None]).T @ (wanted - inputs @ together[:, columns]) / weight.sum()
        ridge = WIDTH / means.effective_tokens * covariance.diagonal().mean() * torch.eye(WIDTH)
        slow = together[:, columns] + torch.linalg.solve(covariance + ridge, left)
        torch.testing.assert_close(corrected, slow, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_clusters_lower_the_weighted_loss(noise: float) -> None:
    head = ClusteredHead(1, noise)
    overall, clusters = head.accumulate()
    exact, groups = head.matrix.T.contiguous(), make_recipe(32, (4, 1.0)).groups(WIDTH)
    options = replace(SolverOptions(), sweeps=4)
    means = overall.mean()
    wanted = means.correct_weights(exact, 0.01)
    plain = solve_exl2(wanted, factorize(wanted, means.hessian, 0.01), groups, options)
    solution = solve_head(exact, overall, clusters, head.membership, groups, options, 0.01)
    assert head.weighted_loss(solution.dequantize()) < 0.85 * head.weighted_loss(plain.dequantize())
    alone = solve_head(exact, overall, [overall], torch.ones(COLUMNS, 1), groups, options, 0.01)
    assert torch.equal(alone.dequantize(), plain.dequantize())


def test_a_cluster_without_weight_uses_the_overall_statistics() -> None:
    head = ClusteredHead(2, 0.1)
    head.token_weights[:, 0] = 0
    exact, groups = head.matrix.T.contiguous(), make_recipe(32, (4, 1.0)).groups(WIDTH)
    overall, clusters = head.accumulate()
    solution = solve_head(exact, overall, clusters, head.membership, groups, SolverOptions(), 0.01)
    assert bool(torch.isfinite(solution.dequantize()).all())
    assert clusters[0].mean().effective_tokens == 0
