"""Temperatures after truncation: the fixed one (`temperature_last`) and the one that follows entropy.

The ordinary temperature is part of the softmax, where candidates are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import Candidates, Params
from .plan import COLDEST


def last(c: Candidates, params: Params, active: Tensor | None) -> None:
    """Probabilities to the power of one over the temperature."""
    _temper(c, params["last"].expand(len(c.p), 1), active)


def dynamic(c: Candidates, params: Params, active: Tensor | None) -> None:
    """A temperature between min_temp and max_temp, by how near the candidates are to equally probable.

    Below 0.01 it leaves only the most probable token, as everywhere.
    """
    entropy = -torch.special.xlogy(c.p, c.p).sum(-1, keepdim=True)
    count = (c.p > 0).sum(-1, keepdim=True)
    highest = torch.where(count > 1, count.double().log(), 1.0)
    share = (entropy / highest).clamp(0.0, 1.0) ** params["exponent"]
    _temper(c, params["min_temp"] + (params["max_temp"] - params["min_temp"]) * share, active)


def _temper(c: Candidates, temperature: Tensor, active: Tensor | None) -> None:
    if active is not None:
        temperature = torch.where(active, temperature, 1.0)
    top, place = c.p.max(-1, keepdim=True)
    power = (c.p / top).log() / temperature.clamp_min(COLDEST)
    first = torch.arange(c.p.shape[1], device=c.p.device) == place
    warm = torch.where((temperature >= COLDEST) | first, power, -torch.inf).exp()
    c.p = warm / warm.sum(-1, keepdim=True)
