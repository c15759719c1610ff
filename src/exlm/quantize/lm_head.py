"""The head onto its grid: scales for all columns, then the codes of each kind for its own inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exl2_solver import Exl2Solution, SolverConfig, solve_exl2
from .gptq import Grid, add_damping, descend_one_sided, factorize
from .layer_solver import HessianAccumulator
from .recipe import Group

SHARED_TOKENS_PER_INPUT = 4
"""Tokens an input that all kinds together count in each one's covariance: single kinds see little text."""

CLUSTER_SWEEPS = 4
"""Sweeps of descent with a kind's own covariance."""


def solve_head(
    exact: Tensor,
    whole: HessianAccumulator,
    clusters: Sequence[HessianAccumulator],
    membership: Tensor,
    groups: Sequence[Group],
    config: SolverConfig,
    damping: float,
) -> Exl2Solution:
    """Codes and scales for `exact` (inputs, columns), given what was heard by all columns and by each kind's.

    Each output alone: heeding how logits matter together makes it worse.
    """
    common = whole.mean()
    wanted = common.correct_weights(exact, damping)
    shares = [
        (sums, membership[:, n].nonzero()[:, 0]) for n, sums in enumerate(clusters) if len(clusters) > 1
    ]
    for sums, columns in shares:
        wanted[:, columns] = sums.mean().correct_columns(exact[:, columns], wanted[:, columns], damping)
    f = factorize(wanted, common.hessian, damping, "head")
    solution = solve_exl2(wanted, f, groups, config)
    target, scales = wanted[f.perm], solution.group_scales()
    for sums, columns in shares:
        own = sums.mean()
        if len(columns) and own.effective_tokens:
            h = own.blend(common, SHARED_TOKENS_PER_INPUT * len(exact))[f.perm][:, f.perm]
            _descend_columns(
                solution, target[:, columns], scales[:, columns], columns, add_damping(h, damping)
            )
    return solution


def _descend_columns(
    solution: Exl2Solution, target: Tensor, scales: Tensor, columns: Tensor, h: Tensor
) -> None:
    """Better codes for some columns, whose targets and scales these are, under their own covariance."""
    codes, scales = solution.codes[:, columns].contiguous(), scales.contiguous()
    grids = list(map(Grid, scales, -solution.half_ranges, solution.half_ranges - 1))
    values = (codes * scales[solution.group_of]).half().float()
    gradient = h @ (target - values)
    for _ in range(CLUSTER_SWEEPS):
        descend_one_sided(codes, gradient, h, solution.sizes, grids)
    solution.codes[:, columns] = codes
