"""Gradients and token weights at the head, against the curvature of the divergence."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from exlm.quantize import sensitivity
from exlm.quantize.layer_loader import make_batch

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 400, 6, 11


class BareHead:
    """A head without a norm."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def forward(self, x: Tensor, more: Tensor | None, batch: Any) -> tuple[Tensor, Tensor]:
        return x @ self.matrix, x


def test_head_gradients_and_token_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(WIDTH, VOCABULARY, generator=generator)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator)
    batch = make_batch(torch.zeros(ROWS, TOKENS, dtype=torch.long))
    membership = torch.eye(3)[torch.arange(VOCABULARY) % 3]
    grads, weights = sensitivity.head_grad(cast(Any, BareHead(matrix)), x, batch, generator, membership)
    probs = (x @ matrix).softmax(-1)
    curvature = torch.diag_embed(probs) - probs[..., :, None] * probs[..., None, :]
    each = curvature.diagonal(dim1=-2, dim2=-1)
    for cluster in range(3):
        assert torch.allclose(weights[..., cluster], each[..., cluster::3].sum(-1), atol=1e-6)
    ends = (probs[..., None, :] - torch.eye(VOCABULARY)) @ matrix.T  # for each token that may be sampled
    assert torch.allclose((grads[..., None, :] - ends).norm(dim=-1).amin(-1), torch.zeros(()), atol=1e-5)
