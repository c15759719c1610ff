"""Split-KV decode attention on tensor cores (Flash-Decoding), for up to MAX_NEW_TOKENS new tokens a row.

Each row's past is cut into chunks by that row's length alone. `split_kv_kernel` gives each (row, kv head)
some programs; each takes every num_splits-th chunk and stores a partial online softmax (max, sum,
accumulator) for it. `combine_kernel` adds the chunks' partials in order. So a row's output is the same, bit
for bit, in any batch, with any page table and any number of programs. The new tokens belong to the last
chunk and are read from k and v as they were passed. In a float cache that chunk's program also applies RoPE
and appends them; a quantised cache needs `rope_append_kv_kernel` before. Nothing on the host depends on the
rows' lengths, so CUDA graphs replay the launch.

GQA: the query heads that share a kv head are rows of one MMA tile, BLOCK_M = tokens x queries per kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kv_quant import INV_GROUP_SIZE, hadamard, load_kv
from .norm_rope_act import load_roped
from .online_softmax import MIN_SCORE, online_softmax

MAX_NEW_TOKENS = tl.constexpr(16)  # of a row


@triton.jit
def chunks_of_row(past_len, window, HAS_WINDOW: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK_ALIGN: tl.constexpr):
    """The first visible key, the tokens of a chunk (both multiples of CHUNK_ALIGN), and the number of chunks.

    The new tokens are a chunk of their own, the last, so that no program takes a full chunk and them.
    """
    first_key = past_len * 0
    if HAS_WINDOW:
        first_key = tl.maximum(past_len - window + 1, 0) // CHUNK_ALIGN * CHUNK_ALIGN
    length = past_len - first_key
    size = tl.maximum(tl.cdiv(tl.cdiv(length, MAX_CHUNKS - 1), CHUNK_ALIGN) * CHUNK_ALIGN, CHUNK_ALIGN)
    return first_key, size, tl.cdiv(length, size) + 1


@triton.jit
def split_kv_loop(
    q, q_pos, start, stop, k_cache, k_scale, v_cache, v_scale, page_table, mask, kv_head, score_scale,
    cap_scale, window,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax (m, l, acc) of queries at positions (M, 1) over stored tokens `start` to `stop`."""
    BLOCK_M: tl.constexpr = q.shape[0]
    m_i = tl.full((BLOCK_M,), MIN_SCORE, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for tile in range(start, stop, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        ok = n < stop
        page = tl.load(page_table + tile // PAGE_SIZE).to(tl.int64)
        slot = (page * PAGE_SIZE + tile % PAGE_SIZE + tl.arange(0, BLOCK_N)) * KV_HEADS + kv_head
        k = load_kv(k_cache, k_scale, slot, ok, K_DTYPE, HEAD_DIM, BLOCK_D).to(q.dtype)
        v = load_kv(v_cache, v_scale, slot, ok, V_DTYPE, HEAD_DIM, BLOCK_D).to(q.dtype)
        visible = ok[None, :]
        if HAS_MASK:
            visible = visible & (tl.load(mask + n, mask=ok, other=0) != 0)[None, :]
        if HAS_WINDOW:
            visible = visible & (q_pos - n[None, :] < window)
        m_i, l_i, acc = online_softmax(q, k, v, visible, m_i, l_i, acc, score_scale, cap_scale, HAS_SOFTCAP)
    return m_i, l_i, acc


@triton.jit
def append_new_tokens(
    k, v, position, cos, sin, mrope_axis, k_token_stride, v_token_stride, pos_token_stride, pos_axis_stride,
    tokens, past_len, kv_head, k_cache, v_cache, page_table, write,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE_DIM: tl.constexpr,
    ROPE_INTERLEAVED: tl.constexpr, MROPE: tl.constexpr, K_DTYPE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A row's new keys and values, (MAX_NEW_TOKENS, D) each.

    For a float cache, apply RoPE and write them; for a quantised one, `rope_append_kv_kernel` did both.
    """
    token = tl.arange(0, MAX_NEW_TOKENS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok = token < tokens
    new_k = load_roped(
        k + token * k_token_stride + kv_head * HEAD_DIM, d, position + token * pos_token_stride, ok, cos,
        sin, mrope_axis, pos_axis_stride, HEAD_DIM, ROPE_DIM, ROPE_INTERLEAVED, MROPE,
    ).to(k.dtype.element_ty)  # fmt: skip
    new_v = tl.load(v + token * v_token_stride + kv_head * HEAD_DIM + d, mask=ok & (d < HEAD_DIM), other=0.0)
    if K_DTYPE == "float":
        new_k, new_v = new_k.to(k_cache.dtype.element_ty), new_v.to(v_cache.dtype.element_ty)
        if write:
            page = tl.load(page_table + (past_len + token) // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            slot = ((page * PAGE_SIZE + (past_len + token) % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM + d
            tl.store(k_cache + slot, new_k, mask=ok & (d < HEAD_DIM))
            tl.store(v_cache + slot, new_v, mask=ok & (d < HEAD_DIM))
    return new_k, new_v


@triton.jit(do_not_specialize=["tokens", "num_splits", "page_table_stride", "mask_stride", "window"])
def split_kv_kernel(
    q, k, v, k_cache, k_scale, v_cache, v_scale, page_table, past_lens, mask, cos, sin, mrope_axis,
    positions, part_max, part_sum, part_acc, tokens, num_splits, page_table_stride, mask_stride,
    q_row_stride, q_token_stride, k_row_stride, k_token_stride, v_row_stride, v_token_stride,
    pos_row_stride, pos_token_stride, pos_axis_stride, score_scale, cap_scale, window,
    KV_HEADS: tl.constexpr, Q_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr, ROPE_INTERLEAVED: tl.constexpr, MROPE: tl.constexpr, K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK_ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, block of BLOCK_M queries, kv head; split): every num_splits-th chunk of the row."""
    pid, split = tl.program_id(0), tl.program_id(1)
    kv_head, blocks = pid % KV_HEADS, tl.cdiv(tokens * Q_PER_KV, BLOCK_M)
    block, row = pid // KV_HEADS % blocks, (pid // KV_HEADS // blocks).to(tl.int64)
    past_len = tl.load(past_lens + row).to(tl.int32)
    first_key, size, chunks = chunks_of_row(past_len, window, HAS_WINDOW, MAX_CHUNKS, CHUNK_ALIGN)
    if split >= chunks:
        return
    page_table += row * page_table_stride
    mask += row * mask_stride
    positions += row * pos_row_stride
    query = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = query // Q_PER_KV, kv_head * Q_PER_KV + query % Q_PER_KV
    ok = token < tokens
    d = tl.arange(0, BLOCK_D)[None, :]
    q_head = q + row * q_row_stride + (token * q_token_stride + head * HEAD_DIM)[:, None]
    q_block = load_roped(
        q_head, d, positions + (token * pos_token_stride)[:, None], ok[:, None], cos, sin, mrope_axis,
        pos_axis_stride, HEAD_DIM, ROPE_DIM, ROPE_INTERLEAVED, MROPE,
    )  # fmt: skip
    q_block = q_block.to(q.dtype.element_ty)
    q_pos = (past_len + token)[:, None]
    partial = ((row * tokens + token) * (KV_HEADS * Q_PER_KV) + head) * MAX_CHUNKS
    for chunk in range(split, chunks, num_splits):
        start = first_key + chunk * size
        m_i, l_i, acc = split_kv_loop(
            q_block, q_pos, start, tl.minimum(start + size, past_len), k_cache, k_scale, v_cache, v_scale,
            page_table, mask, kv_head, score_scale, cap_scale, window, KV_HEADS, HEAD_DIM, BLOCK_D, K_DTYPE,
            V_DTYPE, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        if chunk == chunks - 1:
            new_k, new_v = append_new_tokens(
                k + row * k_row_stride, v + row * v_row_stride, positions, cos, sin, mrope_axis,
                k_token_stride, v_token_stride, pos_token_stride, pos_axis_stride, tokens, past_len,
                kv_head, k_cache, v_cache, page_table, block == 0, KV_HEADS, HEAD_DIM, BLOCK_D, ROPE_DIM,
                ROPE_INTERLEAVED, MROPE, K_DTYPE, PAGE_SIZE,
            )  # fmt: skip
            visible = new_token_mask(token[:, None], past_len, tokens, mask, window, HAS_WINDOW, HAS_MASK)
            m_i, l_i, acc = online_softmax(
                q_block, new_k.to(q_block.dtype), new_v.to(q_block.dtype), visible, m_i, l_i, acc,
                score_scale, cap_scale, HAS_SOFTCAP,
            )  # fmt: skip
        tl.store(part_max + partial + chunk, m_i, mask=ok)
        tl.store(part_sum + partial + chunk, l_i, mask=ok)
        tl.store(part_acc + (partial + chunk)[:, None] * HEAD_DIM + d, acc, mask=ok[:, None] & (d < HEAD_DIM))


@triton.jit
def new_token_mask(token, past_len, tokens, mask, window, HAS_WINDOW: tl.constexpr, HAS_MASK: tl.constexpr):
    """(M, MAX_NEW_TOKENS) causal mask among new tokens; queries `token` (M, 1) always see themselves."""
    n = tl.arange(0, MAX_NEW_TOKENS)[None, :]
    visible = (n <= token) & (n < tokens)
    if HAS_WINDOW:
        visible = visible & (token - n < window)
    if HAS_MASK:
        shown = tl.load(mask + past_len + n, mask=n < tokens, other=0) != 0
        visible = visible & (shown | (n == token))
    return visible


@triton.jit(do_not_specialize=["tokens", "window"])
def combine_kernel(
    part_max, part_sum, part_acc, past_lens, out, tokens, window,
    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNDO_HADAMARD: tl.constexpr,
    NUM_HADAMARD: tl.constexpr, HAS_WINDOW: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    CHUNK_ALIGN: tl.constexpr,
):  # fmt: skip
    """Rescale and add the partials of one query of one head, chunk after chunk."""
    out_row = tl.program_id(0).to(tl.int64)
    past_len = tl.load(past_lens + out_row // Q_HEADS // tokens).to(tl.int32)
    _, _, chunks = chunks_of_row(past_len, window, HAS_WINDOW, MAX_CHUNKS, CHUNK_ALIGN)
    chunk, d = tl.arange(0, MAX_CHUNKS), tl.arange(0, BLOCK_D)[None, :]
    used = chunk < chunks
    maxima = tl.load(part_max + out_row * MAX_CHUNKS + chunk, mask=used, other=MIN_SCORE)
    rescale = tl.exp2(maxima - tl.max(maxima, 0))
    denominator = tl.sum(tl.load(part_sum + out_row * MAX_CHUNKS + chunk, mask=used, other=0.0) * rescale, 0)
    ok = used[:, None] & (d < HEAD_DIM)
    accs = tl.load(part_acc + (out_row * MAX_CHUNKS + chunk)[:, None] * HEAD_DIM + d, mask=ok, other=0.0)
    out_head = (tl.sum(accs * rescale[:, None], 0) / denominator)[None, :]
    if UNDO_HADAMARD:
        out_head = hadamard(out_head, NUM_HADAMARD, False) * INV_GROUP_SIZE
    tl.store(out + out_row * HEAD_DIM + d, out_head.to(out.dtype.element_ty), mask=d < HEAD_DIM)
