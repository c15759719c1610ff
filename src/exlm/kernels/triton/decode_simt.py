"""Split-KV decode attention without tensor cores (SIMT): one new token, a query head for each kv head (MHA).

Chunks and the combine kernel are those of `decode`. A program is one warp. BLOCK_N keys at a time lie in
BLOCK_N lanes, each with an online softmax of its own; lanes are reduced only at a chunk's end, so no
shuffles stall the loop. Vectors are split into groups of 32 numbers and groups into two halves of 16: even
and odd numbers where two codes share a byte, else the first and the last 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import chunks_of_row
from .norm_rope_act import load_roped, tanh
from .online_softmax import MIN_SCORE


@triton.jit
def half_columns(KV_DTYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    """(1, D / 32, 16) the columns of both halves in a vector."""
    g = tl.arange(0, BLOCK_D // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    if KV_DTYPE == "hadamard4":
        return g * 32 + 2 * i, g * 32 + 2 * i + 1
    else:
        return g * 32 + i, g * 32 + i + 16


@triton.jit
def codes_to_fp32(code, ZERO_POINT: tl.constexpr):
    """code - ZERO_POINT as float32 (the 2²³ + code trick: OR the code into 2²³)."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO_POINT)


@triton.jit
def load_halves(codes, slot, ok, KV_DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Both halves (N, D / 32, 16) of the vectors in slots (N, 1, 1), as unscaled float32."""
    g = tl.arange(0, BLOCK_D // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    if KV_DTYPE == "hadamard4":
        byte = tl.load(codes + slot * (HEAD_DIM // 2) + g * 16 + i, mask=ok & (g * 32 < HEAD_DIM), other=0)
        return codes_to_fp32(byte & 15, 8), codes_to_fp32(byte >> 4, 8)
    else:
        column = g * 32 + i
        low = tl.load(codes + slot * HEAD_DIM + column, mask=ok & (column < HEAD_DIM), other=0)
        high = tl.load(codes + slot * HEAD_DIM + column + 16, mask=ok & (column + 16 < HEAD_DIM), other=0)
        if KV_DTYPE == "hadamard8":
            return codes_to_fp32(low, 128), codes_to_fp32(high, 128)
        elif KV_DTYPE == "fp8_e5m2":
            low_fp16 = (low.to(tl.int16) << 8).to(tl.float16, bitcast=True)
            high_fp16 = (high.to(tl.int16) << 8).to(tl.float16, bitcast=True)
            return low_fp16.to(tl.float32), high_fp16.to(tl.float32)
        else:
            return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def apply_group_scales(x, scales, slot, ok, KV_DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Multiply (N, G) numbers by the scales of their groups of codes; floats have none."""
    if KV_DTYPE == "hadamard8" or KV_DTYPE == "hadamard4":
        g = tl.arange(0, x.shape[1])[None, :]
        offset = tl.reshape(slot, (slot.shape[0], 1)) * (HEAD_DIM // 32) + g
        ok_group = tl.reshape(ok, (ok.shape[0], 1)) & (g < HEAD_DIM // 32)
        x = x * tl.load(scales + offset, mask=ok_group, other=0.0).to(tl.float32)
    return x


@triton.jit
def masked_scores(
    low, high, n, stop, q_pos, slot, k_cache, k_scale, mask, score_scale, cap_scale, window,
    KV: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """(N,) scores of stored tokens n (N, 1, 1) for the query's halves (1, D / 32, 16); -inf where hidden."""
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    k_low, k_high = load_halves(k_cache, slot, n < stop, K_DTYPE, KV.HEAD_DIM, KV.BLOCK_D)
    score = tl.sum(low * k_low + high * k_high, 2)
    score = tl.sum(apply_group_scales(score, k_scale, slot, n < stop, K_DTYPE, KV.HEAD_DIM), 1) * score_scale
    if SCORE.HAS_SOFTCAP:
        score = tanh(score) * cap_scale
    lane = tl.reshape(n, (n.shape[0],))
    visible = lane < stop
    if SCORE.HAS_MASK:
        visible = visible & (tl.load(mask + lane, mask=visible, other=0) != 0)
    if SCORE.HAS_WINDOW:
        visible = visible & (q_pos - lane < window)
    return tl.where(visible, score, float("-inf"))


@triton.jit
def kv_slots(page_table, tile, stop, kv_head, KV: tl.constexpr, BLOCK_N: tl.constexpr):
    """Token numbers from `tile` on and their slots, (N, 1, 1) both."""
    n = tl.arange(0, BLOCK_N)[:, None, None]
    page = tl.load(page_table + tile // KV.PAGE_SIZE, mask=tile < stop, other=0).to(tl.int64)
    return tile + n, (page * KV.PAGE_SIZE + tile % KV.PAGE_SIZE + n) * KV.KV_HEADS + kv_head


@triton.jit
def simt_kv_loop(
    low, high, start, stop, q_pos, cache, page_table, mask, kv_head, score_scale, cap_scale, window,
    KV: tl.constexpr, SCORE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each lane's online softmax over its tokens from `start` to `stop`, two tiles of BLOCK_N at a time."""
    k_cache, k_scale, v_cache, v_scale = cache
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    m_i = tl.full((BLOCK_N,), MIN_SCORE, tl.float32)
    l_i = tl.zeros((BLOCK_N,), tl.float32)
    acc_low = tl.zeros((BLOCK_N, KV.BLOCK_D // 32, 16), tl.float32)
    acc_high = tl.zeros((BLOCK_N, KV.BLOCK_D // 32, 16), tl.float32)
    ones = tl.full((BLOCK_N, KV.BLOCK_D // 32), 1.0, tl.float32)
    for tile in range(start, stop, 2 * BLOCK_N):
        n1, slot1 = kv_slots(page_table, tile, stop, kv_head, KV, BLOCK_N)
        n2, slot2 = kv_slots(page_table, tile + BLOCK_N, stop, kv_head, KV, BLOCK_N)
        score1 = masked_scores(
            low, high, n1, stop, q_pos, slot1, k_cache, k_scale, mask, score_scale, cap_scale, window, KV, SCORE
        )
        score2 = masked_scores(
            low, high, n2, stop, q_pos, slot2, k_cache, k_scale, mask, score_scale, cap_scale, window, KV, SCORE
        )
        low1, high1 = load_halves(v_cache, slot1, n1 < stop, V_DTYPE, KV.HEAD_DIM, KV.BLOCK_D)
        low2, high2 = load_halves(v_cache, slot2, n2 < stop, V_DTYPE, KV.HEAD_DIM, KV.BLOCK_D)
        m_new = tl.maximum(m_i, tl.maximum(score1, score2))
        alpha, p1, p2 = tl.exp2(m_i - m_new), tl.exp2(score1 - m_new), tl.exp2(score2 - m_new)
        m_i, l_i = m_new, l_i * alpha + p1 + p2
        w1 = apply_group_scales(ones * p1[:, None], v_scale, slot1, n1 < stop, V_DTYPE, KV.HEAD_DIM)[:, :, None]
        w2 = apply_group_scales(ones * p2[:, None], v_scale, slot2, n2 < stop, V_DTYPE, KV.HEAD_DIM)[:, :, None]
        acc_low = acc_low * alpha[:, None, None] + w1 * low1 + w2 * low2
        acc_high = acc_high * alpha[:, None, None] + w1 * high1 + w2 * high2
    return m_i, l_i, acc_low, acc_high


@triton.jit
def append_new_token(
    low, high, k, v, position, rope, k_cache, v_cache, page_table, past_len, kv_head, score_scale, cap_scale,
    KV: tl.constexpr, ROPE: tl.constexpr, SCORE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax state of the new token alone, in lane 0.

    For a float cache, apply RoPE and write it; for a quantised one, `rope_append_kv_kernel` did both.
    """
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    lane = tl.arange(0, BLOCK_N)[:, None, None]
    first_lane, k, v, position = lane == 0, k + lane * 0, v + lane * 0, position + lane * 0
    k_low_columns, k_high_columns = half_columns(K_DTYPE, KV.BLOCK_D)
    v_low_columns, v_high_columns = half_columns(V_DTYPE, KV.BLOCK_D)
    k_low = load_roped(k, k_low_columns, position, first_lane, rope, KV.HEAD_DIM, ROPE)
    k_high = load_roped(k, k_high_columns, position, first_lane, rope, KV.HEAD_DIM, ROPE)
    v_low = tl.load(v + v_low_columns, mask=first_lane & (v_low_columns < KV.HEAD_DIM), other=0.0).to(tl.float32)
    v_high = tl.load(v + v_high_columns, mask=first_lane & (v_high_columns < KV.HEAD_DIM), other=0.0).to(tl.float32)
    if K_DTYPE == "float":
        page = tl.load(page_table + past_len // KV.PAGE_SIZE).to(tl.int64)
        slot = ((page * KV.PAGE_SIZE + past_len % KV.PAGE_SIZE) * KV.KV_HEADS + kv_head) * KV.HEAD_DIM + lane * 0
        k_low, k_high = k_low.to(k.dtype.element_ty), k_high.to(k.dtype.element_ty)
        k_low, k_high = k_low.to(k_cache.dtype.element_ty), k_high.to(k_cache.dtype.element_ty)
        v_low, v_high = v_low.to(v_cache.dtype.element_ty), v_high.to(v_cache.dtype.element_ty)
        tl.store(k_cache + slot + k_low_columns, k_low, mask=first_lane & (k_low_columns < KV.HEAD_DIM))
        tl.store(k_cache + slot + k_high_columns, k_high, mask=first_lane & (k_high_columns < KV.HEAD_DIM))
        tl.store(v_cache + slot + v_low_columns, v_low, mask=first_lane & (v_low_columns < KV.HEAD_DIM))
        tl.store(v_cache + slot + v_high_columns, v_high, mask=first_lane & (v_high_columns < KV.HEAD_DIM))
        k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
        v_low, v_high = v_low.to(tl.float32), v_high.to(tl.float32)
    score = tl.sum(tl.sum(low * k_low + high * k_high, 2), 1) * score_scale
    if SCORE.HAS_SOFTCAP:
        score = tanh(score) * cap_scale
    is_first = tl.arange(0, BLOCK_N) == 0
    return tl.where(is_first, score, MIN_SCORE), is_first.to(tl.float32), v_low, v_high


@triton.jit(do_not_specialize=["programs_per_head", "page_table_stride", "mask_stride", "window"])
def decode_simt_kernel(
    q, k, v, k_cache, k_scale, v_cache, v_scale, page_table, past_lens, mask, cos, sin, mrope_axis,
    positions, part_max, part_sum, part_acc, programs_per_head, page_table_stride, mask_stride, q_row_stride,
    k_row_stride, v_row_stride, pos_row_stride, pos_axis_stride, score_scale, cap_scale, window,
    KV: tl.constexpr, ROPE: tl.constexpr, SCORE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, head; first chunk): every programs_per_head-th chunk of the row."""
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    first_chunk, kv_head, row = (
        tl.program_id(1),
        tl.program_id(0) % KV.KV_HEADS,
        (tl.program_id(0) // KV.KV_HEADS).to(tl.int64),
    )
    past_len = tl.load(past_lens + row).to(tl.int32)
    first_key, size, chunks = chunks_of_row(past_len, window, SCORE.HAS_WINDOW, SPLIT)
    if first_chunk >= chunks:
        return
    page_table += row * page_table_stride
    mask += row * mask_stride
    positions += row * pos_row_stride
    rope = (cos, sin, mrope_axis, pos_axis_stride)
    zero = tl.arange(0, 1)[:, None, None]
    q_head, position = q + row * q_row_stride + kv_head * KV.HEAD_DIM + zero, positions + zero
    low_columns, high_columns = half_columns(K_DTYPE, KV.BLOCK_D)
    low = load_roped(q_head, low_columns, position, zero == 0, rope, KV.HEAD_DIM, ROPE)
    high = load_roped(q_head, high_columns, position, zero == 0, rope, KV.HEAD_DIM, ROPE)
    low, high = low.to(q.dtype.element_ty).to(tl.float32), high.to(q.dtype.element_ty).to(tl.float32)
    for chunk in range(first_chunk, chunks, programs_per_head):
        if chunk < chunks - 1:
            start = first_key + chunk * size
            m_i, l_i, acc_low, acc_high = simt_kv_loop(
                low, high, start, tl.minimum(start + size, past_len), past_len, (k_cache, k_scale, v_cache, v_scale),
                page_table, mask, kv_head, score_scale, cap_scale, window, KV, SCORE, BLOCK_N,
            )  # fmt: skip
        else:
            m_i, l_i, acc_low, acc_high = append_new_token(
                low, high, k + row * k_row_stride + kv_head * KV.HEAD_DIM,
                v + row * v_row_stride + kv_head * KV.HEAD_DIM, positions, rope, k_cache, v_cache, page_table,
                past_len, kv_head, score_scale, cap_scale, KV, ROPE, SCORE, BLOCK_N,
            )  # fmt: skip
        partial = (row * KV.KV_HEADS + kv_head) * SPLIT.MAX_CHUNKS + chunk
        store_partial(
            m_i, l_i, acc_low, acc_high, part_max + partial, part_sum + partial, part_acc + partial * KV.HEAD_DIM, KV
        )


@triton.jit
def store_partial(m_i, l_i, acc_low, acc_high, max_out, sum_out, acc_out, KV: tl.constexpr):
    """Reduce the lanes of a chunk and write its partial (max, sum, accumulator)."""
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    m_all = tl.max(m_i, 0)
    rescale = tl.exp2(m_i - m_all)
    tl.store(max_out, m_all)
    tl.store(sum_out, tl.sum(l_i * rescale, 0))
    low_columns, high_columns = half_columns(V_DTYPE, KV.BLOCK_D)
    tl.store(
        acc_out + low_columns, tl.sum(acc_low * rescale[:, None, None], 0)[None, :, :], mask=low_columns < KV.HEAD_DIM
    )
    tl.store(
        acc_out + high_columns,
        tl.sum(acc_high * rescale[:, None, None], 0)[None, :, :],
        mask=high_columns < KV.HEAD_DIM,
    )
