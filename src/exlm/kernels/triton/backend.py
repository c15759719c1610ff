"""The Triton backend: attention, rotation, norms and nonlinearities. Matrices are others' business."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ...formats import Weight
from .. import interface as b
from .activation import Bend
from .attention import Attend, Machine
from .norm import WIDEST, Norm
from .rope import Rotation

WIDEST_HEAD = 256


class TritonBackend:
    """Kernels that Triton compiles for a device at first use."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.machine = Machine.of(device)

    def linear(self, weight: Weight) -> b.LinearFn:
        """Not here."""
        raise Unsupported("no kernel for matrices")

    def embedding(self, weight: Weight) -> b.EmbeddingFn:
        """Not here."""
        raise Unsupported("no kernel for embeddings")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.NormFn:
        """In float32, rounded once at the end."""
        return self._norm(norm, weight, bias)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNormFn:
        """Both in one launch."""
        return self._norm(norm, weight, bias).add

    def _norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> Norm:
        if weight.shape[-1] > WIDEST:
            raise Unsupported(f"a norm over {weight.shape[-1]} numbers, at most {WIDEST} fit a program")
        scale = (weight.float() + norm.offset).contiguous()
        return Norm(scale, bias, norm.eps, norm.kind == "layer", self.dtype)

    def activation(self, act: spec.Activation) -> b.ActivationFn:
        """By name."""
        return Bend(act)

    def gated(self, act: spec.Activation) -> b.GatedActivationFn:
        """Both in one launch."""
        return Bend(act).gated

    def rope(self, rope: spec.Rope, length: int) -> b.RopeFn:
        """Tables for every position, which attention uses on its way."""
        return Rotation.of(rope, length, self.device)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Over pages, read where they are."""
        if attn.head_dim > WIDEST_HEAD:
            raise Unsupported(f"heads of {attn.head_dim} numbers, at most {WIDEST_HEAD} fit a program")
        return Attend(attn, rope, self.machine)

    def moe(
        self, moe: spec.Moe, gate: list[b.LinearFn], up: list[b.LinearFn], down: list[b.LinearFn]
    ) -> b.MoeFn:
        """Not here."""
        raise Unsupported("no kernel for experts")
