"""The reference backend: every operation in plain torch, none declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ...formats import DenseWeight, PackedWeight, Weight
from .. import interface as b
from .attention import ReferenceAttention
from .rope import RotaryEmbedding

ACTIVATIONS: dict[spec.Activation, b.ActivationFn] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """RMS norm over the last dimension; a scale of (heads, head_dim) gives each head its own."""

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
    """Layer norm over the last dimension."""

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
    """A residual addition, then a norm."""

    norm: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        total = x if y is None else x + y
        return total, self.norm(total)


@dataclass(frozen=True, eq=False)
class ReferenceMoe:
    """MoE: softmax over all experts in float32, top `active`, their probabilities as routing weights.

    Ties go to the expert with the lower number, on every device.
    """

    active: int
    renormalize: bool
    act: b.ActivationFn
    gate: list[b.LinearFn]
    up: list[b.LinearFn]
    down: list[b.LinearFn]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat = x.flatten(0, 1)
        ranked = logits.flatten(0, 1).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        routing_weights, expert_ids = (rows[:, : self.active] for rows in ranked)
        if self.renormalize:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(len(self.gate)):
            token, slot = torch.where(expert_ids == expert)
            if len(token):
                rows = flat[token]
                output = self.down[expert](self.act(self.gate[expert](rows)) * self.up[expert](rows))
                out.index_add_(0, token, output * routing_weights[token, slot, None].to(output.dtype))
        return out.view_as(x)


class ReferenceBackend:
    """Every part of a model in plain torch."""

    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: Weight) -> b.LinearFn:
        """Dense weights as they are; any other format is dequantised in each call."""
        if isinstance(weight, DenseWeight):
            return partial(F.linear, weight=weight.data, bias=weight.bias)
        return partial(_dequantized, weight, self.dtype)

    def embedding(self, weight: Weight) -> b.EmbeddingFn:
        """Rows of a dense table; of a packed one, only the requested columns are dequantised."""
        if isinstance(weight, DenseWeight):
            return partial(F.embedding, weight=weight.data)
        if isinstance(weight, PackedWeight):
            return partial(_dequantized_columns, weight)
        raise Unsupported(f"an embedding stored as {weight.describe()} is not known")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.NormFn:
        """Computed in float32, rounded once at the end."""
        scale = weight.float() + norm.offset
        if norm.kind == "rms":
            return RmsNorm(scale, norm.eps, self.dtype)
        return LayerNorm(scale, bias, norm.eps, self.dtype)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNormFn:
        """The addition, then the norm."""
        return AddNorm(self.norm(norm, weight, bias))

    def activation(self, act: spec.Activation) -> b.ActivationFn:
        """From ACTIVATIONS."""
        return ACTIVATIONS[act]

    def gated(self, act: spec.Activation) -> b.GatedActivationFn:
        """The activation, then the product."""
        return partial(_gated, self.activation(act))

    def rope(self, rope: spec.Rope, length: int) -> b.RopeFn:
        """Tables of all positions."""
        return RotaryEmbedding(rope, length, self.device)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Softmax over all visible keys."""
        return ReferenceAttention(rope, attn.scale, attn.window, attn.softcap)

    def moe(
        self, moe: spec.Moe, gate: list[b.LinearFn], up: list[b.LinearFn], down: list[b.LinearFn]
    ) -> b.MoeFn:
        """One expert after the other, each on the tokens routed to it."""
        return ReferenceMoe(moe.active, moe.renormalize, self.activation(moe.act), gate, up, down)


def _gated(act: b.ActivationFn, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _dequantized_columns(weight: PackedWeight, ids: Tensor) -> Tensor:
    return weight.take_columns(ids.flatten()).dequantize().T.view(*ids.shape, -1)


def _dequantized(weight: Weight, dtype: torch.dtype, x: Tensor) -> Tensor:
    y = x @ weight.dequantize().to(dtype)
    return y if weight.bias is None else y + weight.bias
