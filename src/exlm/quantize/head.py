"""The head onto its grid: scales for all columns, then the codes of each kind for its own inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .recipe import Group
from .rounding import Grid, damped, descend, factors
from .solve import Effort, Solution, solve
from .streams import Sums

BORROWED = 4
"""Tokens an input that all kinds together count in each one's covariance: single kinds see little text."""

AGAIN = 4
"""Sweeps of descent with a kind's own covariance."""


def solve_head(
    exact: Tensor,
    whole: Sums,
    kinds: Sequence[Sums],
    belongs: Tensor,
    groups: Sequence[Group],
    effort: Effort,
    damping: float,
) -> Solution:
    """Codes and scales for `exact` (inputs, columns), given what was heard by all columns and by each kind's.

    Each output alone: heeding how logits matter together makes it worse.
    """
    common = whole.means()
    wanted = common.moved(exact, damping)
    shares = [(sums, belongs[:, n].nonzero()[:, 0]) for n, sums in enumerate(kinds) if len(kinds) > 1]
    for sums, columns in shares:
        wanted[:, columns] = sums.means().moved_on(exact[:, columns], wanted[:, columns], damping)
    f = factors(wanted, common.covariance, damping, "head")
    solution = solve(wanted, f, groups, effort)
    target, scales = wanted[f.order], solution.factors()
    for sums, columns in shares:
        own = sums.means()
        if len(columns) and own.worth:
            h = own.joined(common, BORROWED * len(exact))[f.order][:, f.order]
            _descend(solution, target[:, columns], scales[:, columns], columns, damped(h, damping))
    return solution


def _descend(solution: Solution, target: Tensor, scales: Tensor, columns: Tensor, h: Tensor) -> None:
    """Better codes for some columns, whose targets and scales these are, under their own covariance."""
    codes, scales = solution.codes[:, columns].contiguous(), scales.contiguous()
    grids = list(map(Grid, scales, -solution.halves, solution.halves - 1))
    values = (codes * scales[solution.group_of]).half().float()
    gradient = h @ (target - values)
    for _ in range(AGAIN):
        descend(codes, gradient, h, solution.sizes, grids)
    solution.codes[:, columns] = codes
