"""Normalisation in float32 with one rounding at the end, over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """x / root-mean-square(x) · scale; a scale of (heads, head_dim) gives each head its own."""

    scale: Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.scale).to(self.dtype)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean) / deviation · scale + bias."""

    scale: Tensor
    bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        wide = F.layer_norm(x.float(), (x.shape[-1],), eps=self.eps) * self.scale
        return (wide if self.bias is None else wide + self.bias).to(self.dtype)


@dataclass(frozen=True, eq=False)
class AddNorm:
    """An addition, then a norm."""

    norm: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, and the sum normalised."""
        total = x if y is None else x + y
        return total, self.norm(total)
