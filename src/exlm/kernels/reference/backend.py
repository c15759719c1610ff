"""The reference backend: every operation in plain torch, none declined."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ...formats import DenseWeight, PackedWeight, Weight
from .. import interface as b
from .attention import ReferenceAttention
from .moe import ReferenceMoe
from .norm import AddNorm, LayerNorm, RmsNorm
from .rope import RotaryEmbedding

ACTIVATIONS: dict[spec.Activation, b.ActivationFn] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class ReferenceBackend:
    """Plain torch; takes every layer there is."""

    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: Weight) -> b.LinearFn:
        """Dense weights multiply as they are; any other form is dequantised for each call."""
        if isinstance(weight, DenseWeight):
            return partial(F.linear, weight=weight.data, bias=weight.bias)
        return partial(_dequantized, weight, self.dtype)

    def embedding(self, weight: Weight) -> b.EmbeddingFn:
        """Rows of a dense table; of a packed one, only the vectors asked for are unpacked."""
        if isinstance(weight, DenseWeight):
            return partial(F.embedding, weight=weight.data)
        if isinstance(weight, PackedWeight):
            return partial(_dequantized_columns, weight)
        raise Unsupported(f"an embedding stored as {weight.describe()} is not known")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.NormFn:
        """In float32, rounded once at the end."""
        scale = weight.float() + norm.offset
        if norm.kind == "rms":
            return RmsNorm(scale, norm.eps, self.dtype)
        return LayerNorm(scale, bias, norm.eps, self.dtype)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNormFn:
        """One after the other."""
        return AddNorm(self.norm(norm, weight, bias))

    def activation(self, act: spec.Activation) -> b.ActivationFn:
        """By name."""
        return ACTIVATIONS[act]

    def gated(self, act: spec.Activation) -> b.GatedActivationFn:
        """One after the other."""
        return partial(_gated, self.activation(act))

    def rope(self, rope: spec.Rope, length: int) -> b.RopeFn:
        """Tables for every position, built once."""
        return RotaryEmbedding(rope, length, self.device)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Softmax over all visible keys."""
        return ReferenceAttention(rope, attn.scale, attn.window, attn.softcap)

    def moe(
        self, moe: spec.Moe, gate: list[b.LinearFn], up: list[b.LinearFn], down: list[b.LinearFn]
    ) -> b.MoeFn:
        """One expert after the other, each on the tokens that chose it."""
        return ReferenceMoe(moe.active, moe.renormalize, self.activation(moe.act), gate, up, down)


def _gated(act: b.ActivationFn, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _dequantized_columns(weight: PackedWeight, ids: Tensor) -> Tensor:
    return weight.take_columns(ids.flatten()).dequantize().T.view(*ids.shape, -1)


def _dequantized(weight: Weight, dtype: torch.dtype, x: Tensor) -> Tensor:
    y = x @ weight.dequantize().to(dtype)
    return y if weight.bias is None else y + weight.bias
