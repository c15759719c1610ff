"""Classifier-free guidance: one distribution out of two, the second of which is steered away from.

The pair of rows comes from one job with two prompts. Which rows form a pair is the caller's business.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix_logits(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """scale · log p(wanted) + (1 - scale) · log p(unwanted) for rows (rows, vocab) and scales (rows, 1).

    1 is the first prompt alone, 0 the second; more than 1 moves away from the second. What the first
    excludes stays excluded.
    """
    mixed = scale * torch.log_softmax(positive, -1) + (1.0 - scale) * torch.log_softmax(negative, -1)
    return mixed.masked_fill_(positive == -torch.inf, -torch.inf)
