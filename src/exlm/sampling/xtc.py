"""XTC: exclude top choices. Of the tokens that are all probable enough, only the least probable surely stays.

In expectation, without a random number of its own: the others keep the part of their probability that
remains if they are excluded with the given probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling_layout import THRESHOLD_TOLERANCE
from .candidates import BatchParams, Candidates


def xtc(c: Candidates, params: BatchParams, exempt: Tensor | None) -> None:
    """Scale down all but the least probable token above the threshold; `spared` ones (rows, k) never count.

    Rows that do not use it have a probability of exclusion of 0, which changes nothing.
    """
    above_threshold = (c.p >= params["xtc_threshold"] * (1.0 - THRESHOLD_TOLERANCE)) & (c.p > 0)
    if exempt is not None:
        above_threshold &= ~exempt
    lowest_prob = torch.where(above_threshold, c.p, torch.inf).amin(-1, keepdim=True)
    columns = torch.arange(c.p.shape[1], device=c.p.device)
    # Of equally probable tokens the last one stays, which in descending order is the last of all.
    kept_column = torch.where(above_threshold & (c.p == lowest_prob), columns, -1).amax(-1, keepdim=True)
    excluded = above_threshold & (columns != kept_column)
    mass = torch.where(excluded, c.p, 0.0).sum(-1, keepdim=True)
    probability = params["xtc_probability"]
    scale_up = 1.0 + probability * mass / (1.0 - mass).clamp_min(1e-300)
    c.p = c.p * torch.where(excluded, 1.0 - probability, scale_up)
