"""Temperatures after truncation: the fixed one (`temperature_last`) and the one that follows entropy.

The ordinary temperature is part of the softmax, where candidates are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling_layout import GREEDY_BELOW_TEMPERATURE
from .candidates import BatchParams, Candidates


def final_temperature(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """Probabilities to the power of one over the temperature."""
    _apply_temperature(c, params["final_temperature"].expand(len(c.p), 1), active)


def dynamic_temperature(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """A temperature between min_temp and max_temp, by how near the candidates are to equally probable.

    Below 0.01 it leaves only the most probable token, as everywhere.
    """
    entropy = -torch.special.xlogy(c.p, c.p).sum(-1, keepdim=True)
    count = (c.p > 0).sum(-1, keepdim=True)
    max_entropy = torch.where(count > 1, count.double().log(), 1.0)
    relative_entropy = (entropy / max_entropy).clamp(0.0, 1.0) ** params["exponent"]
    _apply_temperature(
        c, params["min_temp"] + (params["max_temp"] - params["min_temp"]) * relative_entropy, active
    )


def _apply_temperature(c: Candidates, temperature: Tensor, active: Tensor | None) -> None:
    if active is not None:
        temperature = torch.where(active, temperature, 1.0)
    top, top_column = c.p.max(-1, keepdim=True)
    power = (c.p / top).log() / temperature.clamp_min(GREEDY_BELOW_TEMPERATURE)
    is_top = torch.arange(c.p.shape[1], device=c.p.device) == top_column
    weights = torch.where((temperature >= GREEDY_BELOW_TEMPERATURE) | is_top, power, -torch.inf).exp()
    c.p = weights / weights.sum(-1, keepdim=True)
