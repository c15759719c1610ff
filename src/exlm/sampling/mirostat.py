"""Mirostat 2: truncation at a surprise that follows the text, so that its average stays near tau.

The target mu belongs to the job (`SamplerState`); here are only the step and how a pick moves the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import SLACK, Candidates


def mirostat(c: Candidates, targets: Tensor, active: Tensor | None) -> None:
    """Tokens no more surprising, in bits, than each row's target (rows, 1); at least the most probable."""
    least = torch.exp2(-targets) * (1.0 - SLACK)
    c.keep(c.p >= torch.minimum(least, c.p.amax(-1, keepdim=True)), active)


def moved(targets: Tensor, tau: Tensor, eta: Tensor, p: Tensor) -> Tensor:
    """The targets after tokens of probability p were picked."""
    return targets + eta * (tau + p.log2())
