"""Four- and eight-bit codes for keys and values: rotate, scale each 32 numbers by their peak, round.

The rotation is a Walsh-Hadamard transform of 32 numbers, which spreads an outlier over its neighbours. The
codes are defined down to the bit, with float16 rounding after every step, so any kernel can be held against
these functions. They work on vectors, (…, D) for the D numbers of a token, and know nothing of pages.

Float16 ends at 65504, and decoding passes through sums 32 times the answer. A sum beyond the end stays at the
end: a number beyond ±2047 comes back smaller and its neighbours less exact, but none becomes infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Numbers that share a scale, and the length of a transform."""

FP16_MAX = 65504.0  # of float16


def to_float16_saturating(x: Tensor) -> Tensor:
    """Numbers as float16; those beyond its range become its largest."""
    return x.float().clamp(-FP16_MAX, FP16_MAX).half()


def num_interleaved(size: int) -> int:
    """Transforms side by side in a run: two (even and odd places) if runs of 64 fit, else one."""
    return 2 if size % (2 * GROUP_SIZE) == 0 else 1


def hadamard_transform(x: Tensor) -> Tensor:
    """Transform (…, D) float16 without normalising; twice is 32 times the input, but for roundings."""
    interleaved = num_interleaved(x.shape[-1])
    # The transforms lie along the first dimension, so that every stage adds whole rows of memory.
    runs = x.reshape(-1, GROUP_SIZE, interleaved).transpose(0, 1).contiguous()  # (32, runs, ways)
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
    """Codes (…, D · bits / 8) as bytes and scales (…, D / 32) as float16 of numbers (…, D); D is of 32s."""
    zero_point = 1 << (bits - 1)
    groups = hadamard_transform(to_float16_saturating(x)).view(*x.shape[:-1], -1, GROUP_SIZE)
    peak = groups.abs().amax(-1, keepdim=True).float()
    normalized = (groups.float() / peak).half().float()
    levels = (normalized * zero_point + zero_point).half().float().round()
    # A group of zeros divides 0 by 0: any code will do beside a scale of zero, and it is zero by convention.
    codes = levels.nan_to_num(0.0).clamp(0, 2 * zero_point - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, (peak / zero_point).half().squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The float16 numbers (…, D) that codes and scales stand for."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    centred = codes.half() - (1 << (bits - 1))
    rotated = centred.view(*scales.shape, GROUP_SIZE) * scales[..., None]
    return hadamard_transform(rotated.flatten(-2)) / GROUP_SIZE
