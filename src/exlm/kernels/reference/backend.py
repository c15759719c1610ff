"""The reference backend: every operation in plain torch, none declined."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ...formats import DenseWeight, PackedWeight, Weight
from .. import backend as b
from .attention import Attend
from .experts import Experts
from .norm import AddNorm, LayerNorm, RmsNorm
from .rope import Rotation

ACTIVATIONS: dict[spec.Activation, b.Activation] = {
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

    def linear(self, weight: Weight) -> b.Linear:
        """Dense weights multiply as they are; any other form is dequantised for each call."""
        if isinstance(weight, DenseWeight):
            return partial(F.linear, weight=weight.data, bias=weight.bias)
        return partial(_dequantized, weight, self.dtype)

    def embedding(self, weight: Weight) -> b.Lookup:
        """Rows of a dense table; of a packed one, only the vectors asked for are unpacked."""
        if isinstance(weight, DenseWeight):
            return partial(F.embedding, weight=weight.data)
        if isinstance(weight, PackedWeight):
            return partial(_unpacked_vectors, weight)
        raise Unsupported(f"an embedding stored as {weight.describe()} is not known")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.Norm:
        """In float32, rounded once at the end."""
        scale = weight.float() + norm.offset
        if norm.kind == "rms":
            return RmsNorm(scale, norm.eps, self.dtype)
        return LayerNorm(scale, bias, norm.eps, self.dtype)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNorm:
        """One after the other."""
        return AddNorm(self.norm(norm, weight, bias))

    def activation(self, act: spec.Activation) -> b.Activation:
        """By name."""
        return ACTIVATIONS[act]

    def gated(self, act: spec.Activation) -> b.Gated:
        """One after the other."""
        return partial(_gated, self.activation(act))

    def rotation(self, rope: spec.Rope, length: int) -> b.Rotation:
        """Tables for every position, built once."""
        return Rotation(rope, length, self.device)

    def attention(self, attn: spec.Attention, rotate: b.Rotation) -> b.Attend:
        """Softmax over all visible keys."""
        return Attend(rotate, attn.scale, attn.window, attn.softcap)

    def experts(
        self, moe: spec.Moe, gate: list[b.Linear], up: list[b.Linear], down: list[b.Linear]
    ) -> b.Experts:
        """One expert after the other, each on the tokens that chose it."""
        return Experts(moe.active, moe.renormalize, self.activation(moe.act), gate, up, down)


def _gated(act: b.Activation, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _unpacked_vectors(weight: PackedWeight, ids: Tensor) -> Tensor:
    return weight.columns(ids.flatten()).dequantize().T.view(*ids.shape, -1)


def _dequantized(weight: Weight, dtype: torch.dtype, x: Tensor) -> Tensor:
    y = x @ weight.dequantize().to(dtype)
    return y if weight.bias is None else y + weight.bias
