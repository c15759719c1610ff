"""A token's head in the cache: from numbers to codes, bit for bit as the cache defines them, and back.

Rotated codes are read without undoing the rotation. A Walsh-Hadamard transform H of 32 numbers is symmetric
and its own inverse but for a factor of 32, so q·Hx = Hq·x: the kernels turn the query once, attend among
rotated keys and values, and turn the answer back.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(65504.0)  # of float16
GROUP = tl.constexpr(32)  # numbers that share a scale, and the length of a transform


@triton.jit
def halves(x):
    """float32 numbers as float16 holds them; those beyond its range become its largest."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16).to(tl.float32)


@triton.jit
def spread(x, WAYS: tl.constexpr, ROUND: tl.constexpr):
    """Transform (R, D) floats without normalising, WAYS transforms interleaved; ROUND steps to float16."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    for i in tl.static_range(5):
        pairs = tl.reshape(x, (R, D // (WAYS << (i + 1)), 2, WAYS << i))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, D))
        if ROUND:
            x = halves(x)
    return x


@triton.jit
def prepared(x, CODING: tl.constexpr, WAYS: tl.constexpr):
    """(R, D) float32 heads in the space they are stored in."""
    if CODING == "hadamard8" or CODING == "hadamard4":
        x = spread(halves(x), WAYS, True)
    return x


@triton.jit
def keep(x, codes, scales, home, ok, CODING: tl.constexpr, HEAD: tl.constexpr):
    """Write (R, D) prepared heads to their places among all heads of the cache, (R, 1) of them."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    d = tl.arange(0, D)[None, :]
    if CODING == "float":
        tl.store(codes + home * HEAD + d, x.to(codes.dtype.element_ty), mask=ok & (d < HEAD))
    elif CODING == "fp8_e5m2":
        upper = (halves(x).to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)
        tl.store(codes + home * HEAD + d, upper, mask=ok & (d < HEAD))
    else:
        centre: tl.constexpr = 128 if CODING == "hadamard8" else 8
        groups = tl.reshape(x, (R, D // GROUP, GROUP))
        peak = tl.max(tl.abs(groups), 2)
        whole = tl.where(peak == 0.0, 1.0, peak)[:, :, None]
        share = tl.div_rn(groups, tl.broadcast_to(whole, groups.shape)).to(tl.float16).to(tl.float32)
        level = (share * centre + centre).to(tl.float16).to(tl.float32)
        level = (level + 12582912.0) - 12582912.0  # 1.5 · 2²³: what is added and taken away again rounds
        level = tl.minimum(tl.maximum(level, 0.0), 2.0 * centre - 1.0)
        code = tl.where((peak == 0.0)[:, :, None], 0.0, level).to(tl.int32)
        g = tl.arange(0, D // GROUP)[None, :]
        tl.store(scales + home * (HEAD // GROUP) + g, (peak / centre).to(tl.float16),
                 mask=ok & (g < HEAD // GROUP))  # fmt: skip
        if CODING == "hadamard8":
            tl.store(codes + home * HEAD + d, tl.reshape(code, (R, D)).to(tl.uint8), mask=ok & (d < HEAD))
        else:
            low, high = tl.split(tl.reshape(code, (R, D // 2, 2)))
            b = tl.arange(0, D // 2)[None, :]
            tl.store(codes + home * (HEAD // 2) + b, (low | (high << 4)).to(tl.uint8),
                     mask=ok & (b < HEAD // 2))  # fmt: skip


@triton.jit
def recalled(codes, scales, home, ok, CODING: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    """(N, D) stored heads from (N,) places: floats as they are stored, codes as float16 and still rotated."""
    N: tl.constexpr = home.shape[0]
    if CODING == "float" or CODING == "fp8_e5m2":
        d = tl.arange(0, D)[None, :]
        stored = tl.load(codes + home[:, None] * HEAD + d, mask=ok[:, None] & (d < HEAD), other=0)
        if CODING == "fp8_e5m2":
            stored = (stored.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        return stored
    else:
        G: tl.constexpr = D // GROUP
        g = tl.arange(0, G)[None, :]
        there = ok[:, None] & (g < HEAD // GROUP)
        scale = tl.load(scales + home[:, None] * (HEAD // GROUP) + g, mask=there, other=0.0)[:, :, None]
        BYTES: tl.constexpr = GROUP if CODING == "hadamard8" else GROUP // 2
        at = home[:, None] * (HEAD // GROUP * BYTES) + g * BYTES
        byte = tl.load(
            codes + at[:, :, None] + tl.arange(0, BYTES)[None, None, :], mask=there[:, :, None], other=0
        )
        if CODING == "hadamard8":
            return tl.reshape(_steps(byte, 128) * scale, (N, D))
        else:
            both = tl.join(_steps(byte & 15, 8) * scale, _steps(byte >> 4, 8) * scale)
            return tl.reshape(both, (N, D))


@triton.jit
def _steps(code, CENTRE: tl.constexpr):
    """A code below 1024 less its centre, as float16: the code becomes the low bits of 1024.0."""
    return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + CENTRE)
