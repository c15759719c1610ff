"""Quantise keys and values to 4 or 8 bits: Hadamard-rotate, scale each group of 32 by its peak, round.

The rotation is a Walsh-Hadamard transform of 32 numbers, which spreads an outlier over its group. The
codes are defined bit for bit, with float16 rounding after every step, so that kernels can be compared with
these functions. They work on vectors, (…, D) for the D numbers of a token, not on pages.

Float16 ends at 65504, and dequantising passes through sums of 32 times the result, which saturate: a
number beyond ±2047 is dequantised to a smaller one and its group less exactly, but none becomes infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Numbers that share a scale; also the length of a transform."""

FP16_MAX = 65504.0


def to_float16_saturating(x: Tensor) -> Tensor:
    """Round to float16; numbers beyond its range saturate."""
    return x.float().clamp(-FP16_MAX, FP16_MAX).half()


def num_interleaved(size: int) -> int:
    """How many Hadamard transforms of 32 numbers are interleaved in a vector of `size` numbers: two or one.

    Two transform the numbers at even and odd places of each 64; a size that is no multiple of 64 has one.
    """
    return 2 if size % (2 * GROUP_SIZE) == 0 else 1


def hadamard_transform(x: Tensor) -> Tensor:
    """Transform (…, D) float16, not normalised: applied twice it gives 32 times the input, up to rounding."""
    interleaved = num_interleaved(x.shape[-1])
    # Transforms run along the first dimension, so that every butterfly stage adds contiguous rows.
    runs = x.reshape(-1, GROUP_SIZE, interleaved).transpose(0, 1).contiguous()  # (32, runs, interleaved)
    scratch = torch.empty_like(runs)
    for stride in (1, 2, 4, 8, 16):
        a, b = runs.view(GROUP_SIZE // 2 // stride, 2, stride, -1).unbind(1)
        sums, differences = scratch.view(GROUP_SIZE // 2 // stride, 2, stride, -1).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        scratch.clamp_(-FP16_MAX, FP16_MAX)
        runs, scratch = scratch, runs
    return runs.transpose(0, 1).reshape(x.shape)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(…, D) numbers → codes (…, D · bits / 8) as bytes and scales (…, D / 32) as float16."""
    zero_point = 1 << (bits - 1)
    groups = hadamard_transform(to_float16_saturating(x)).view(*x.shape[:-1], -1, GROUP_SIZE)
    peak = groups.abs().amax(-1, keepdim=True).float()
    normalized = (groups.float() / peak).half().float()
    levels = (normalized * zero_point + zero_point).half().float().round()
    # A group of zeros divides 0 by 0: with a scale of 0 any code would do; code 0 by convention.
    codes = levels.nan_to_num(0.0).clamp(0, 2 * zero_point - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, (peak / zero_point).half().squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes and scales → (…, D) float16 numbers."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    centred = codes.half() - (1 << (bits - 1))
    rotated = centred.view(*scales.shape, GROUP_SIZE) * scales[..., None]
    return hadamard_transform(rotated.flatten(-2)) / GROUP_SIZE
