"""The columns of a head in kinds, each with the inputs that it should be right for.

To second order a token's logit that is off by d costs d² p (1 - p) / 2 nats, p being its chance: a column
should be exact where its own token is likely. Too little text tells of single columns; those that point the
same way are likely at the same places, and go together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CLUSTERS = 64
"""Kinds at most."""

MAX_HESSIAN_BYTES = 2**29
"""Bytes their covariances may take: with wide inputs there are fewer kinds."""

KMEANS_STEPS = 12
"""Of finding who belongs together."""


def cluster_count(inputs: int, columns: int) -> int:
    """How many kinds the columns of a head are put into."""
    return max(1, min(MAX_CLUSTERS, MAX_HESSIAN_BYTES // (8 * inputs * inputs), columns // 16))


def cluster_columns(matrix: Tensor, count: int, seed: int) -> Tensor:
    """(columns, count) ones where a column of `matrix` (columns, inputs) is of a kind, by its direction."""
    columns = len(matrix)
    first = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:count]
    centres = F.normalize(matrix[first.to(matrix.device)], dim=1)
    lengths = matrix.norm(dim=1).clamp(min=1e-30)
    for turn in range(KMEANS_STEPS):
        nearest = (matrix @ centres.T).argmax(1)  # their lengths decide nothing
        belongs = F.one_hot(nearest, count).to(matrix.dtype)
        if turn + 1 < KMEANS_STEPS:
            centres = torch.where(
                belongs.sum(0)[:, None] > 0,
                F.normalize((belongs / lengths[:, None]).T @ matrix, dim=1),
                centres,
            )
    return belongs


def cluster_token_weights(probs: Tensor, membership: Tensor) -> Tensor:
    """(…, kinds) how much a token's logits of each kind matter, from their chances (…, columns)."""
    return torch.addcmul(probs, probs, probs, value=-1).clamp_(min=0) @ membership
