"""One step of the online softmax: scores of a tile of keys, running max and sum, rescaled accumulator."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .norm_rope_act import tanh

MIN_SCORE = tl.constexpr(-1.0e30)  # below every score, yet finite: -inf - -inf would be NaN


class ScoreLayout(NamedTuple):
    """Which steps lie between q·k and the softmax, as a constant that kernels are compiled for."""

    HAS_WINDOW: bool
    HAS_SOFTCAP: bool
    HAS_MASK: bool


@triton.jit
def online_softmax(
    q, k, v, visible, m_i, l_i, acc, score_scale, cap_scale,
    HAS_SOFTCAP: tl.constexpr, ALL_VISIBLE: tl.constexpr = False,
):  # fmt: skip
    """Add a tile of keys (N, D) and values (N, D) to the state of queries (M, D); returns the new state.

    m_i is each query's largest score so far, l_i the sum of its weights, acc the weighted sum of values.
    Weights are powers of two: score_scale contains log2(e). Only `visible` keys count, or all of them with
    ALL_VISIBLE.
    """
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:
        score = tanh(score * score_scale)
        score_scale = cap_scale
    if not ALL_VISIBLE:
        score = tl.where(visible, score, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(score, 1) * score_scale)
    p = tl.exp2(score * score_scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


def score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """score_scale and cap_scale: factors on q·k, and on the score after the softcap's tanh."""
    log2e = 1.4426950408889634
    return (scale * log2e, 1.0) if softcap is None else (scale / softcap, softcap * log2e)
