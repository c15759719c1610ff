"""What products of packed matrices should be, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exlm.formats.packed import PackedWeight
from exlm.kernels.cuda.gemm_m16 import RmsNorm

LIMIT = 1.5e-3  # what rounding to float16 costs
ACTS = {
    "silu": F.silu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def entered(x: Tensor, norm: RmsNorm | None) -> Tensor:
    """x as it enters the matrix."""
    wide = x.double()
    if norm is None:
        return wide
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    return scaled.half().double()


def product(x: Tensor, packed: PackedWeight, norm: RmsNorm | None = None) -> Tensor:
    """norm(x) @ W + bias."""
    y = entered(x, norm) @ packed.dequantize().double()
    return y if packed.bias is None else y + packed.bias.double()


def gated(x: Tensor, gate: PackedWeight, up: PackedWeight, norm: RmsNorm | None, act: str) -> Tensor:
    """act(gate) · up."""
    return ACTS[act](product(x, gate, norm)) * product(x, up, norm)


def off(got: Tensor, want: Tensor) -> float:
    """How far from right, relative to what is right."""
    return float((got.double() - want).norm() / want.norm())
