"""XTC: exclude top choices. Of the tokens that are all probable enough, only the least probable surely stays.

In expectation, without a random number of its own: the others keep the part of their probability that
remains if they are excluded with the given probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import SLACK, Candidates, Params


def xtc(c: Candidates, params: Params, spared: Tensor | None) -> None:
    """Scale down all but the least probable token above the threshold; `spared` ones (rows, k) never count.

    Rows that do not use it have a probability of exclusion of 0, which changes nothing.
    """
    enough = (c.p >= params["xtc_threshold"] * (1.0 - SLACK)) & (c.p > 0)
    if spared is not None:
        enough &= ~spared
    least = torch.where(enough, c.p, torch.inf).amin(-1, keepdim=True)
    columns = torch.arange(c.p.shape[1], device=c.p.device)
    # Of equally probable tokens the last one stays, which in descending order is the last of all.
    stays = torch.where(enough & (c.p == least), columns, -1).amax(-1, keepdim=True)
    excluded = enough & (columns != stays)
    mass = torch.where(excluded, c.p, 0.0).sum(-1, keepdim=True)
    chance = params["xtc_probability"]
    grown = 1.0 + chance * mass / (1.0 - mass).clamp_min(1e-300)
    c.p = c.p * torch.where(excluded, 1.0 - chance, grown)
