"""Split-KV decode attention on tensor cores (Flash-Decoding), for up to MAX_NEW_TOKENS new tokens a row.

Each row's past is cut into chunks by that row's length alone. `split_kv_kernel` gives each (row, kv head)
some programs; each takes every programs_per_head-th chunk and stores a partial online softmax (max, sum,
accumulator) for it. `combine_kernel` adds the chunks' partials in order. So a row's output is the same, bit
for bit, in any batch, with any page table and any number of programs. The new tokens belong to the last
chunk and are read from k and v as they were passed. In a float cache that chunk's program also applies RoPE
and appends them; a quantised cache needs `rope_append_kv_kernel` before. Nothing on the host depends on the
rows' lengths, so CUDA graphs replay the launch.

GQA: the query heads that share a kv head are rows of one MMA tile, BLOCK_M = tokens x queries per kv head.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .kv_quant import INV_GROUP_SIZE, hadamard, load_kv
from .norm_rope_act import load_roped
from .online_softmax import MIN_SCORE, online_softmax

MAX_NEW_TOKENS = tl.constexpr(16)  # of a row


class KVSplit(NamedTuple):
    """How a row's past is cut into chunks, as a constant that kernels are compiled for."""

    MAX_CHUNKS: int  # of a row, its new tokens counted as one
    CHUNK_ALIGN: int  # chunks are multiples of this many tokens


@triton.jit
def chunks_of_row(past_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first visible key, the tokens of a chunk (both multiples of SPLIT.CHUNK_ALIGN), and the number of chunks.

    The new tokens are a chunk of their own, the last, so that no program takes a full chunk and them.
    """
    first_key = past_len * 0
    if HAS_WINDOW:
        first_key = tl.maximum(past_len - window + 1, 0) // SPLIT.CHUNK_ALIGN * SPLIT.CHUNK_ALIGN
    length = past_len - first_key
    size = tl.maximum(
        tl.cdiv(tl.cdiv(length, SPLIT.MAX_CHUNKS - 1), SPLIT.CHUNK_ALIGN) * SPLIT.CHUNK_ALIGN, SPLIT.CHUNK_ALIGN
    )
    return first_key, size, tl.cdiv(length, size) + 1


@triton.jit
def split_kv_loop(
    q, q_pos, start, stop, cache, page_table, mask, kv_head, score_scale, cap_scale, window,
    KV: tl.constexpr, SCORE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax (m, l, acc) of queries at positions (M, 1) over stored tokens `start` to `stop`."""
    k_cache, k_scale, v_cache, v_scale = cache
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    BLOCK_M: tl.constexpr = q.shape[0]
    m_i = tl.full((BLOCK_M,), MIN_SCORE, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    BLOCK_D: tl.constexpr = KV.BLOCK_D
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for tile in range(start, stop, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        ok = n < stop
        page = tl.load(page_table + tile // KV.PAGE_SIZE).to(tl.int64)
        slot = (page * KV.PAGE_SIZE + tile % KV.PAGE_SIZE + tl.arange(0, BLOCK_N)) * KV.KV_HEADS + kv_head
        k = load_kv(k_cache, k_scale, slot, ok, K_DTYPE, KV.HEAD_DIM, KV.BLOCK_D).to(q.dtype)
        v = load_kv(v_cache, v_scale, slot, ok, V_DTYPE, KV.HEAD_DIM, KV.BLOCK_D).to(q.dtype)
        visible = ok[None, :]
        if SCORE.HAS_MASK:
            visible = visible & (tl.load(mask + n, mask=ok, other=0) != 0)[None, :]
        if SCORE.HAS_WINDOW:
            visible = visible & (q_pos - n[None, :] < window)
        m_i, l_i, acc = online_softmax(q, k, v, visible, m_i, l_i, acc, score_scale, cap_scale, SCORE.HAS_SOFTCAP)
    return m_i, l_i, acc


@triton.jit
def append_new_tokens(
    k, v, position, rope, k_token_stride, v_token_stride, pos_token_stride, tokens, past_len, kv_head,
    k_cache, v_cache, page_table, write, KV: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """A row's new keys and values, (MAX_NEW_TOKENS, D) each.

    For a float cache, apply RoPE and write them; for a quantised one, `rope_append_kv_kernel` did both.
    """
    token = tl.arange(0, MAX_NEW_TOKENS)[:, None]
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    ok = token < tokens
    k_head, token_position = k + token * k_token_stride + kv_head * KV.HEAD_DIM, position + token * pos_token_stride
    new_k = load_roped(k_head, d, token_position, ok, rope, KV.HEAD_DIM, ROPE).to(k.dtype.element_ty)
    new_v = tl.load(v + token * v_token_stride + kv_head * KV.HEAD_DIM + d, mask=ok & (d < KV.HEAD_DIM), other=0.0)
    if KV.K_DTYPE == "float":
        new_k, new_v = new_k.to(k_cache.dtype.element_ty), new_v.to(v_cache.dtype.element_ty)
        if write:
            page = tl.load(page_table + (past_len + token) // KV.PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            slot = ((page * KV.PAGE_SIZE + (past_len + token) % KV.PAGE_SIZE) * KV.KV_HEADS + kv_head) * KV.HEAD_DIM + d
            tl.store(k_cache + slot, new_k, mask=ok & (d < KV.HEAD_DIM))
            tl.store(v_cache + slot, new_v, mask=ok & (d < KV.HEAD_DIM))
    return new_k, new_v


@triton.jit(do_not_specialize=["tokens", "programs_per_head", "page_table_stride", "mask_stride", "window"])
def split_kv_kernel(
    q, k, v, k_cache, k_scale, v_cache, v_scale, page_table, past_lens, mask, cos, sin, mrope_axis,
    positions, part_max, part_sum, part_acc, tokens, programs_per_head, page_table_stride, mask_stride,
    q_row_stride, q_token_stride, k_row_stride, k_token_stride, v_row_stride, v_token_stride,
    pos_row_stride, pos_token_stride, pos_axis_stride, score_scale, cap_scale, window,
    Q_PER_KV: tl.constexpr, KV: tl.constexpr, ROPE: tl.constexpr, SCORE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, block of BLOCK_M queries, kv head; first chunk): every programs_per_head-th chunk of the row."""
    pid, first_chunk = tl.program_id(0), tl.program_id(1)
    kv_head, blocks = pid % KV.KV_HEADS, tl.cdiv(tokens * Q_PER_KV, BLOCK_M)
    block, row = pid // KV.KV_HEADS % blocks, (pid // KV.KV_HEADS // blocks).to(tl.int64)
    past_len = tl.load(past_lens + row).to(tl.int32)
    first_key, size, chunks = chunks_of_row(past_len, window, SCORE.HAS_WINDOW, SPLIT)
    if first_chunk >= chunks:
        return
    page_table += row * page_table_stride
    mask += row * mask_stride
    positions += row * pos_row_stride
    rope = (cos, sin, mrope_axis, pos_axis_stride)
    query = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = query // Q_PER_KV, kv_head * Q_PER_KV + query % Q_PER_KV
    ok = token < tokens
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    q_head = q + row * q_row_stride + (token * q_token_stride + head * KV.HEAD_DIM)[:, None]
    q_block = load_roped(
        q_head, d, positions + (token * pos_token_stride)[:, None], ok[:, None], rope, KV.HEAD_DIM, ROPE
    )
    q_block = q_block.to(q.dtype.element_ty)
    q_pos = (past_len + token)[:, None]
    partial = ((row * tokens + token) * (KV.KV_HEADS * Q_PER_KV) + head) * SPLIT.MAX_CHUNKS
    for chunk in range(first_chunk, chunks, programs_per_head):
        start = first_key + chunk * size
        m_i, l_i, acc = split_kv_loop(
            q_block, q_pos, start, tl.minimum(start + size, past_len), (k_cache, k_scale, v_cache, v_scale),
            page_table, mask, kv_head, score_scale, cap_scale, window, KV, SCORE, BLOCK_N,
        )  # fmt: skip
        if chunk == chunks - 1:
            new_k, new_v = append_new_tokens(
                k + row * k_row_stride, v + row * v_row_stride, positions, rope, k_token_stride, v_token_stride,
                pos_token_stride, tokens, past_len, kv_head, k_cache, v_cache, page_table, block == 0, KV, ROPE,
            )  # fmt: skip
            visible = new_token_mask(token[:, None], past_len, tokens, mask, window, SCORE)
            m_i, l_i, acc = online_softmax(
                q_block, new_k.to(q_block.dtype), new_v.to(q_block.dtype), visible, m_i, l_i, acc,
                score_scale, cap_scale, SCORE.HAS_SOFTCAP,
            )  # fmt: skip
        tl.store(part_max + partial + chunk, m_i, mask=ok)
        tl.store(part_sum + partial + chunk, l_i, mask=ok)
        tl.store(part_acc + (partial + chunk)[:, None] * KV.HEAD_DIM + d, acc, mask=ok[:, None] & (d < KV.HEAD_DIM))


@triton.jit
def new_token_mask(token, past_len, tokens, mask, window, SCORE: tl.constexpr):
    """(M, MAX_NEW_TOKENS) causal mask among new tokens; queries `token` (M, 1) always see themselves."""
    n = tl.arange(0, MAX_NEW_TOKENS)[None, :]
    visible = (n <= token) & (n < tokens)
    if SCORE.HAS_WINDOW:
        visible = visible & (token - n < window)
    if SCORE.HAS_MASK:
        shown = tl.load(mask + past_len + n, mask=n < tokens, other=0) != 0
        visible = visible & (shown | (n == token))
    return visible


@triton.jit(do_not_specialize=["tokens", "window"])
def combine_kernel(
    part_max, part_sum, part_acc, past_lens, out, tokens, window,
    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNDO_HADAMARD: tl.constexpr,
    NUM_HADAMARD: tl.constexpr, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Rescale and add the partials of one query of one head, chunk after chunk."""
    out_row = tl.program_id(0).to(tl.int64)
    past_len = tl.load(past_lens + out_row // Q_HEADS // tokens).to(tl.int32)
    _, _, chunks = chunks_of_row(past_len, window, HAS_WINDOW, SPLIT)
    chunk, d = tl.arange(0, SPLIT.MAX_CHUNKS), tl.arange(0, BLOCK_D)[None, :]
    used = chunk < chunks
    maxima = tl.load(part_max + out_row * SPLIT.MAX_CHUNKS + chunk, mask=used, other=MIN_SCORE)
    rescale = tl.exp2(maxima - tl.max(maxima, 0))
    denominator = tl.sum(tl.load(part_sum + out_row * SPLIT.MAX_CHUNKS + chunk, mask=used, other=0.0) * rescale, 0)
    ok = used[:, None] & (d < HEAD_DIM)
    accs = tl.load(part_acc + (out_row * SPLIT.MAX_CHUNKS + chunk)[:, None] * HEAD_DIM + d, mask=ok, other=0.0)
    out_head = (tl.sum(accs * rescale[:, None], 0) / denominator)[None, :]
    if UNDO_HADAMARD:
        out_head = hadamard(out_head, NUM_HADAMARD, False) * INV_GROUP_SIZE
    tl.store(out + out_row * HEAD_DIM + d, out_head.to(out.dtype.element_ty), mask=d < HEAD_DIM)
