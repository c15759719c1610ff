"""The Triton backend: attention, RoPE, norms and activation functions; matrices run in other backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from .. import interface
from .attention import DeviceLimits, PagedAttention
from .norm_rope_act import MAX_NORM_WIDTH, Activation, Norm, RopeTables

MAX_HEAD_DIM = 256


def _declines(what: str) -> Callable[..., Any]:
    """A method that declines; the reason names what there is no kernel for."""

    def decline(*_: Any, **__: Any) -> Any:
        raise Unsupported(f"no kernel for {what}")

    return decline


class TritonBackend:
    """Kernels that Triton compiles for the GPU at first use."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.limits = DeviceLimits.of(device)

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.NormFn:
        """Computed in float32, rounded once at the end."""
        return self._norm(norm, weight, bias)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.AddNormFn:
        """Addition and norm in one launch."""
        return self._norm(norm, weight, bias).add

    def _norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> Norm:
        if weight.shape[-1] > MAX_NORM_WIDTH:
            raise Unsupported(f"a norm over {weight.shape[-1]} numbers, at most {MAX_NORM_WIDTH} fit a program")
        scale = (weight.float() + norm.offset).contiguous()
        return Norm(scale, bias, norm.eps, norm.kind == "layer", self.dtype)

    def activation(self, act: spec.Activation) -> interface.ActivationFn:
        """One launch."""
        return Activation(act)

    def gated(self, act: spec.Activation) -> interface.GatedActivationFn:
        """act(gate) · up in one launch."""
        return Activation(act).gated

    def rope(self, rope: spec.Rope, length: int) -> interface.RopeFn:
        """Tables for every position; attention kernels read them as their prologue."""
        return RopeTables.of(rope, length, self.device)

    def attention(self, attn: spec.Attention, rope: interface.RopeFn) -> interface.AttentionFn:
        """Paged attention, with RoPE and the write to the cache in its launches."""
        if attn.head_dim > MAX_HEAD_DIM:
            raise Unsupported(f"heads of {attn.head_dim} numbers, at most {MAX_HEAD_DIM} fit a program")
        return PagedAttention(attn, rope, self.limits)

    linear, embedding, moe = map(_declines, ("matrices", "embeddings", "experts"))
    delta_net, mamba2, short_conv = map(_declines, ("delta nets", "Mamba 2", "short convolutions"))
