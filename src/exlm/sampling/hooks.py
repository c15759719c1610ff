"""Post-sampling hooks: callables that see every sampled token and may put another in its place.

The shapes are those that hooks written for exllamav2 expect. The engine calls hooks, not the sampler, before
it appends a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class PostSamplingResult:
    """What a hook is given. It may assign `sampled_token`, and `feed_filters` to keep filters from seeing it.

    Shapes: token and probability (1, 1), candidates (1, 1, k) or None unless top tokens were requested,
    logits (1, 1, vocab) as the model gave them, if they are at hand.
    """

    sampled_token: Any
    sampled_prob: Tensor | None = None
    candidate_tokens: Tensor | None = None
    candidate_probs: Tensor | None = None
    logits: Tensor | None = None
    feed_filters: bool = True

    @property
    def token(self) -> int:
        """The token, whatever a hook assigned: an integer or a tensor of one element."""
        return int(self.sampled_token)


PostSamplingHook = Callable[[PostSamplingResult], Any]


def call_hooks(
    hooks: Sequence[PostSamplingHook],
    token: int,
    prob: float,
    candidates: tuple[Sequence[int], Sequence[float]] | None = None,
    logits: Tensor | None = None,
) -> PostSamplingResult:
    """Call every hook in turn with a token; returns the result as they left it."""
    tokens, probs = candidates if candidates is not None else (None, None)
    result = PostSamplingResult(
        torch.tensor([[token]]),
        torch.tensor([[prob]]),
        None if tokens is None else torch.tensor([[list(tokens)]]),
        None if probs is None else torch.tensor([[list(probs)]]),
        None if logits is None else logits.reshape(1, 1, -1),
    )
    for hook in hooks:
        hook(result)
    return result
