"""Mirostat 2: truncation at a surprise that follows the text, so that its average stays near tau.

The target mu belongs to the job (`SamplerState`); here are only the step and how a pick moves the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling_layout import THRESHOLD_TOLERANCE
from .candidates import Candidates


def mirostat(c: Candidates, mus: Tensor, active: Tensor | None) -> None:
    """Tokens no more surprising, in bits, than each row's target (rows, 1); at least the most probable."""
    min_prob = torch.exp2(-mus) * (1.0 - THRESHOLD_TOLERANCE)
    c.keep_and_renormalize(c.p >= torch.minimum(min_prob, c.p.amax(-1, keepdim=True)), active)


def updated_mus(mus: Tensor, tau: Tensor, eta: Tensor, p: Tensor) -> Tensor:
    """The targets after tokens of probability p were picked."""
    return mus + eta * (tau + p.log2())
