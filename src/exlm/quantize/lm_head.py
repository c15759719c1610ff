"""The output head: its columns (the vocabulary) in clusters, each solved for the tokens where it matters.

To second order a logit that is off by d costs d² p (1 - p) / 2 nats, p being its probability: a column should
be exact where its own token is likely. The calibration says too little about single columns; columns of
similar direction are likely at the same places and share one weighted Hessian. Outputs are rounded
independently of each other: a Hessian over the logits made results worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .allocation import Group
from .config import SolverConfig
from .coordinate_descent import descend_one_sided
from .gptq import Grid, add_damping, factorize
from .layer_solver import HessianAccumulator
from .matrix_solver import Exl2Solution, solve_exl2

MAX_CLUSTERS = 64
MAX_HESSIAN_BYTES = 2**29
"""Bytes that the Hessians of all clusters may take: wide models have fewer clusters."""

KMEANS_STEPS = 12

SHARED_TOKENS_PER_INPUT = 4
"""Tokens per input that the overall Hessian counts as in each cluster's, which sees little text."""

CLUSTER_SWEEPS = 4
"""Sweeps of coordinate descent with a cluster's own Hessian."""


def cluster_count(inputs: int, columns: int) -> int:
    """How many clusters a head of this shape gets."""
    return max(1, min(MAX_CLUSTERS, MAX_HESSIAN_BYTES // (8 * inputs * inputs), columns // 16))


def cluster_columns(matrix: Tensor, count: int, seed: int) -> Tensor:
    """(columns, count) one-hot clusters of the columns of `matrix` (columns, inputs): spherical k-means."""
    columns = len(matrix)
    first = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:count]
    centres = F.normalize(matrix[first.to(matrix.device)], dim=1)
    lengths = matrix.norm(dim=1).clamp(min=1e-30)
    for step in range(KMEANS_STEPS):
        nearest = (matrix @ centres.T).argmax(1)  # a column's own length does not change which is nearest
        membership = F.one_hot(nearest, count).to(matrix.dtype)
        if step + 1 < KMEANS_STEPS:
            centres = torch.where(
                membership.sum(0)[:, None] > 0,
                F.normalize((membership / lengths[:, None]).T @ matrix, dim=1),
                centres,
            )
    return membership


def cluster_token_weights(probs: Tensor, membership: Tensor) -> Tensor:
    """(…, clusters) each token's weight for each cluster: the sum of p (1 - p) over the cluster's columns.

    `probs` (…, columns) are the model's probabilities at those tokens.
    """
    return torch.addcmul(probs, probs, probs, value=-1).clamp_(min=0) @ membership


def solve_head(
    w: Tensor,
    overall: HessianAccumulator,
    clusters: Sequence[HessianAccumulator],
    membership: Tensor,
    groups: Sequence[Group],
    config: SolverConfig,
    damping: float,
) -> Exl2Solution:
    """Codes and scales for `w` (inputs, columns), with the statistics of all columns and of each cluster's.

    All columns are solved together with the overall Hessian, then each cluster's codes descend with its own.
    """
    common = overall.mean()
    target = common.correct_weights(w, damping)
    members = [
        (accumulator, membership[:, n].nonzero()[:, 0])
        for n, accumulator in enumerate(clusters)
        if len(clusters) > 1
    ]
    for accumulator, columns in members:
        target[:, columns] = accumulator.mean().correct_columns(w[:, columns], target[:, columns], damping)
    f = factorize(target, common.hessian, damping, "head")
    solution = solve_exl2(target, f, groups, config)
    target, scales = target[f.perm], solution.group_scales()
    for accumulator, columns in members:
        own = accumulator.mean()
        if len(columns) and own.effective_tokens:
            h = own.blend(common, SHARED_TOKENS_PER_INPUT * len(w))[f.perm][:, f.perm]
            _descend_columns(
                solution, target[:, columns], scales[:, columns], columns, add_damping(h, damping)
            )
    return solution


def _descend_columns(
    solution: Exl2Solution, target: Tensor, scales: Tensor, columns: Tensor, h: Tensor
) -> None:
    """Improve the codes of some columns under their own Hessian `h`; `target` and `scales` are theirs."""
    codes, scales = solution.codes[:, columns].contiguous(), scales.contiguous()
    grids = list(map(Grid, scales, -solution.half_ranges, solution.half_ranges - 1))
    values = (codes * scales[solution.group_of]).half().float()
    gradient = h @ (target - values)
    for _ in range(CLUSTER_SWEEPS):
        descend_one_sided(codes, gradient, h, solution.sizes, grids)
    solution.codes[:, columns] = codes
