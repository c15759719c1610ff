"""One step of a softmax that meets its keys tile by tile, and what decides which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh

NOTHING = tl.constexpr(-1.0e30)  # a peak below every score, yet finite: differences of it are no NaN


@triton.jit
def fold(q, k, v, seen, top, total, acc, factor, cap, CAPPED: tl.constexpr, ALL: tl.constexpr = False):
    """Take in a tile of keys (N, D) and values (N, D); scores are powers of two, `factor` brings them there.

    `top` is each query's highest score so far, `total` the sum of its weights, `acc` that of its values. Of
    the keys, those `seen` count, or ALL.
    """
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        score = tanh(score * factor)
        factor = cap
    if not ALL:
        score = tl.where(seen, score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor - peak[:, None])
    fade = tl.exp2(top - peak)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return peak, total * fade + tl.sum(weight, 1), acc


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The two factors of `fold`: on q·k, and on the bent score."""
    log2e = 1.4426950408889634
    return (scale * log2e, 1.0) if softcap is None else (scale / softcap, softcap * log2e)
