"""Prefill: FlashAttention forward for many new tokens, over keys in pages or in contiguous rows.

GQA: each program takes BLOCK_M queries of one query head and reads the keys of the kv head it belongs to.
Keys that every query of the block sees are taken in without masks, the rest with the causal (and window)
mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import MIN_SCORE, online_softmax


@triton.jit
def prefill_kv_loop(
    q, q_pos, start, stop, num_keys, k, v, k_token_stride, v_token_stride, page_table, mask, m_i, l_i, acc,
    score_scale, cap_scale, window,
    KV: tl.constexpr, SCORE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add keys `start` to `stop` to the online softmax of queries at positions (M, 1).

    CAUSAL: some of these keys are hidden from some queries, or lie beyond the last one.
    """
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    for tile in range(start, stop, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        key_row = n.to(tl.int64)
        if KV.PAGE_SIZE > 0:
            key_row = (
                tl.load(page_table + tile // KV.PAGE_SIZE).to(tl.int64) * KV.PAGE_SIZE
                + tile % KV.PAGE_SIZE
                + tl.arange(0, BLOCK_N)
            )
        if CAUSAL or KV.BLOCK_D != KV.HEAD_DIM:
            in_bounds = (d < KV.HEAD_DIM) & (n < num_keys)[:, None]
            new_k = tl.load(k + key_row[:, None] * k_token_stride + d, mask=in_bounds, other=0.0).to(q.dtype)
            new_v = tl.load(v + key_row[:, None] * v_token_stride + d, mask=in_bounds, other=0.0).to(q.dtype)
        else:
            new_k = tl.load(k + key_row[:, None] * k_token_stride + d).to(q.dtype)
            new_v = tl.load(v + key_row[:, None] * v_token_stride + d).to(q.dtype)
        visible = (n >= 0)[None, :]
        if CAUSAL:
            visible = n[None, :] <= q_pos
            if SCORE.HAS_WINDOW:
                visible = visible & (q_pos - n[None, :] < window)
        if SCORE.HAS_MASK:
            visible = visible & ((tl.load(mask + n, mask=n < num_keys, other=0) != 0)[None, :] | (n[None, :] == q_pos))
        m_i, l_i, acc = online_softmax(
            q, new_k, new_v, visible, m_i, l_i, acc, score_scale, cap_scale, SCORE.HAS_SOFTCAP,
            not CAUSAL and not SCORE.HAS_MASK,
        )  # fmt: skip
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["tokens", "page_table_stride", "mask_stride", "window"])
def flash_attn_kernel(
    q, k, v, page_table, past_lens, mask, out, tokens, page_table_stride, mask_stride, q_row_stride,
    q_token_stride, k_row_stride, k_token_stride, v_row_stride, v_token_stride, score_scale, cap_scale,
    window,
    Q_PER_KV: tl.constexpr, KV: tl.constexpr, SCORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of BLOCK_M queries, query head, row); the last blocks, the longest, start first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    past_len = tl.load(past_lens + row).to(tl.int32)
    token = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    ok = (token < tokens) & (d < KV.HEAD_DIM)
    q_block = tl.load(
        q + row * q_row_stride + token.to(tl.int64) * q_token_stride + head * KV.HEAD_DIM + d, mask=ok, other=0.0
    )
    k += row * k_row_stride + (head // Q_PER_KV) * KV.HEAD_DIM
    v += row * v_row_stride + (head // Q_PER_KV) * KV.HEAD_DIM
    page_table += row * page_table_stride
    mask += row * mask_stride
    q_pos = past_len + token
    num_keys = past_len + tokens
    first_query = past_len + block * BLOCK_M
    first_key = first_query * 0
    causal_start = first_query // BLOCK_N * BLOCK_N  # every query sees the tiles from first_key to here
    if SCORE.HAS_WINDOW:
        first_key = tl.maximum(first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        causal_start = first_key
    m_i = tl.full((BLOCK_M,), MIN_SCORE, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    BLOCK_D: tl.constexpr = KV.BLOCK_D
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i, l_i, acc = prefill_kv_loop(
        q_block, q_pos, first_key, causal_start, num_keys, k, v, k_token_stride, v_token_stride, page_table,
        mask, m_i, l_i, acc, score_scale, cap_scale, window, KV, SCORE, False, BLOCK_N,
    )  # fmt: skip
    m_i, l_i, acc = prefill_kv_loop(
        q_block, q_pos, causal_start, tl.minimum(first_query + BLOCK_M, num_keys), num_keys, k, v,
        k_token_stride, v_token_stride, page_table, mask, m_i, l_i, acc, score_scale, cap_scale, window,
        KV, SCORE, True, BLOCK_N,
    )  # fmt: skip
    out_offset = ((row * tokens + token) * (KV.KV_HEADS * Q_PER_KV) + head) * KV.HEAD_DIM + d
    tl.store(out + out_offset, (acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]).to(out.dtype.element_ty), mask=ok)
