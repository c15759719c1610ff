"""Write keys and values to the paged KV cache and read them back, bit for bit as `kvcache` defines its codes.

The hadamard dtypes store integers of Hadamard-transformed numbers. Attention kernels read them without undoing
the transform: the Walsh-Hadamard matrix H of 32 numbers is symmetric and its own inverse but for a factor of
32, so q·Hx = Hq·x. The query is transformed once, attention runs among transformed keys and values, and the
output is transformed back. Only prefill, which reads each key many times, dequantises the past first
(`dequantize_kv_kernel`). RoPE comes before all of that.

    vector (HEAD_DIM codes)   8 bits: [x0:8] [x1:8] ... [x31:8] | next group of 32      a bracket is a byte,
                              4 bits: [x1:4 x0:4] [x3:4 x2:4] ... [x31:4 x30:4] | ...   bits 7 to 0 from the left
    scales (HEAD_DIM / 32)    one float16 for each group: x = (code - zero point) * scale, zero point 128 or 8

R, N: vectors, each the BLOCK_D (HEAD_DIM padded to a power of two) numbers of one kv head of one token. A
slot is such a vector's index in the cache: (page * PAGE_SIZE + place in the page) * KV_HEADS + kv_head.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..interface import KVCacheDtype
from .norm_rope_act import load_roped

FP16_MAX = tl.constexpr(65504.0)
GROUP_SIZE = tl.constexpr(32)  # numbers that share a scale; also the length of a Hadamard transform
INV_GROUP_SIZE = tl.constexpr(1.0 / 32)  # two transforms multiply by 32


class KVLayout(NamedTuple):
    """The shape and storage of a layer's keys and values, as a constant that kernels are compiled for."""

    KV_HEADS: int
    HEAD_DIM: int
    BLOCK_D: int  # HEAD_DIM padded to a power of two
    PAGE_SIZE: int  # tokens; 0 for contiguous rows
    K_DTYPE: KVCacheDtype = "float"
    V_DTYPE: KVCacheDtype = "float"
    NUM_HADAMARD: int = 1  # transforms interleaved in a token's codes


@triton.jit
def round_fp16(x):
    """Round float32 to float16 and back; values beyond its range saturate."""
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def hadamard(x, NUM_HADAMARD: tl.constexpr, ROUND_FP16: tl.constexpr):
    """Walsh-Hadamard transform of (R, D) floats, not normalised: NUM_HADAMARD transforms of 32, interleaved.

    ROUND_FP16 rounds every butterfly step to float16, as the definition in `kvcache.hadamard` does.
    """
    R: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    for i in tl.static_range(5):
        pairs = tl.reshape(x, (R, BLOCK_D // (NUM_HADAMARD << (i + 1)), 2, NUM_HADAMARD << i))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, BLOCK_D))
        if ROUND_FP16:
            x = round_fp16(x)
    return x


@triton.jit
def to_cache_space(x, KV_DTYPE: tl.constexpr, NUM_HADAMARD: tl.constexpr):
    """(R, D) float32 vectors, Hadamard-transformed if the cache stores them so."""
    if KV_DTYPE == "hadamard8" or KV_DTYPE == "hadamard4":
        x = hadamard(round_fp16(x), NUM_HADAMARD, True)
    return x


@triton.jit
def store_kv(x, codes, scales, slot, ok, KV_DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Quantise (R, D) vectors, which are in the cache's space, and write them to (R, 1) slots."""
    R: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    d = tl.arange(0, BLOCK_D)[None, :]
    if KV_DTYPE == "float":
        tl.store(codes + slot * HEAD_DIM + d, x.to(codes.dtype.element_ty), mask=ok & (d < HEAD_DIM))
    elif KV_DTYPE == "fp8_e5m2":
        upper = (round_fp16(x).to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)
        tl.store(codes + slot * HEAD_DIM + d, upper, mask=ok & (d < HEAD_DIM))
    else:
        zero_point: tl.constexpr = 128 if KV_DTYPE == "hadamard8" else 8
        groups = tl.reshape(x, (R, BLOCK_D // GROUP_SIZE, GROUP_SIZE))
        peak = tl.max(tl.abs(groups), 2)
        divisor = tl.where(peak == 0.0, 1.0, peak)[:, :, None]
        normalized = tl.div_rn(groups, tl.broadcast_to(divisor, groups.shape)).to(tl.float16).to(tl.float32)
        level = (normalized * zero_point + zero_point).to(tl.float16).to(tl.float32)
        level = (level + 12582912.0) - 12582912.0  # adding and subtracting 1.5 · 2²³ rounds to an integer
        level = tl.minimum(tl.maximum(level, 0.0), 2.0 * zero_point - 1.0)
        code = tl.where((peak == 0.0)[:, :, None], 0.0, level).to(tl.int32)
        g = tl.arange(0, BLOCK_D // GROUP_SIZE)[None, :]
        tl.store(
            scales + slot * (HEAD_DIM // GROUP_SIZE) + g, (peak / zero_point).to(tl.float16),
            mask=ok & (g < HEAD_DIM // GROUP_SIZE),
        )  # fmt: skip
        if KV_DTYPE == "hadamard8":
            tl.store(codes + slot * HEAD_DIM + d, tl.reshape(code, (R, BLOCK_D)).to(tl.uint8), mask=ok & (d < HEAD_DIM))
        else:
            low, high = tl.split(tl.reshape(code, (R, BLOCK_D // 2, 2)))
            b = tl.arange(0, BLOCK_D // 2)[None, :]
            tl.store(
                codes + slot * (HEAD_DIM // 2) + b, (low | (high << 4)).to(tl.uint8),
                mask=ok & (b < HEAD_DIM // 2),
            )  # fmt: skip


@triton.jit
def load_kv(codes, scales, slot, ok, KV_DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Read (N, D) vectors from (N,) slots: floats as stored, codes as float16 and still Hadamard-transformed."""
    BLOCK_N: tl.constexpr = slot.shape[0]
    if KV_DTYPE == "float" or KV_DTYPE == "fp8_e5m2":
        d = tl.arange(0, BLOCK_D)[None, :]
        stored = tl.load(codes + slot[:, None] * HEAD_DIM + d, mask=ok[:, None] & (d < HEAD_DIM), other=0)
        if KV_DTYPE == "fp8_e5m2":
            stored = (stored.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        return stored
    else:
        G: tl.constexpr = BLOCK_D // GROUP_SIZE
        g = tl.arange(0, G)[None, :]
        ok_group = ok[:, None] & (g < HEAD_DIM // GROUP_SIZE)
        scale = tl.load(scales + slot[:, None] * (HEAD_DIM // GROUP_SIZE) + g, mask=ok_group, other=0.0)[:, :, None]
        BYTES: tl.constexpr = GROUP_SIZE if KV_DTYPE == "hadamard8" else GROUP_SIZE // 2
        offset = slot[:, None] * (HEAD_DIM // GROUP_SIZE * BYTES) + g * BYTES
        byte = tl.load(
            codes + offset[:, :, None] + tl.arange(0, BYTES)[None, None, :], mask=ok_group[:, :, None], other=0
        )
        if KV_DTYPE == "hadamard8":
            return tl.reshape(codes_to_fp16(byte, 128) * scale, (BLOCK_N, BLOCK_D))
        else:
            pairs = tl.join(codes_to_fp16(byte & 15, 8) * scale, codes_to_fp16(byte >> 4, 8) * scale)
            return tl.reshape(pairs, (BLOCK_N, BLOCK_D))


@triton.jit
def codes_to_fp16(code, ZERO_POINT: tl.constexpr):
    """code - ZERO_POINT as float16 for codes below 1024 (the 1024 + code trick: OR the code into 1024.0)."""
    return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO_POINT)


@triton.jit(do_not_specialize=["tokens", "page_table_stride", "pos_row_stride"])
def rope_append_kv_kernel(
    q, k, v, q_out, k_out, v_out, k_cache, k_scale, v_cache, v_scale, page_table, past_lens, cos, sin,
    mrope_axis, positions, tokens, page_table_stride, q_row_stride, q_token_stride, k_row_stride,
    k_token_stride, v_row_stride, v_token_stride, pos_row_stride, pos_token_stride, pos_axis_stride,
    Q_HEADS: tl.constexpr, KV: tl.constexpr, ROPE: tl.constexpr, BLOCK_T: tl.constexpr, CACHE_SPACE: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to q and k, write k and v to the cache. Program (block of tokens, head of q, k or v, row).

    CACHE_SPACE returns q, k and v Hadamard-transformed where the cache's codes are, for decode kernels.
    """
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    ok = token < tokens
    position = positions + row * pos_row_stride + token * pos_token_stride
    rope = (cos, sin, mrope_axis, pos_axis_stride)
    if head < Q_HEADS:
        q_head = q + row * q_row_stride + token * q_token_stride + head * KV.HEAD_DIM
        x = load_roped(q_head, d, position, ok, rope, KV.HEAD_DIM, ROPE)
        if CACHE_SPACE and (K_DTYPE == "hadamard8" or K_DTYPE == "hadamard4"):
            x = hadamard(x.to(q.dtype.element_ty).to(tl.float32), KV.NUM_HADAMARD, False) * INV_GROUP_SIZE
        out_offset = ((row * tokens + token) * Q_HEADS + head) * KV.HEAD_DIM + d
        tl.store(q_out + out_offset, x.to(q_out.dtype.element_ty), mask=ok & (d < KV.HEAD_DIM))
    else:
        kv_head = (head - Q_HEADS) % KV.KV_HEADS
        key_index = tl.load(past_lens + row) + token
        page = tl.load(page_table + row * page_table_stride + key_index // KV.PAGE_SIZE, mask=ok, other=0).to(tl.int64)
        slot = (page * KV.PAGE_SIZE + key_index % KV.PAGE_SIZE) * KV.KV_HEADS + kv_head
        out_offset = ((row * tokens + token) * KV.KV_HEADS + kv_head) * KV.HEAD_DIM + d
        if head < Q_HEADS + KV.KV_HEADS:
            k_head = k + row * k_row_stride + token * k_token_stride + kv_head * KV.HEAD_DIM
            new_k = load_roped(k_head, d, position, ok, rope, KV.HEAD_DIM, ROPE)
            new_k = new_k.to(k.dtype.element_ty).to(tl.float32)
            transformed = to_cache_space(new_k, K_DTYPE, KV.NUM_HADAMARD)
            store_kv(transformed, k_cache, k_scale, slot, ok, K_DTYPE, KV.HEAD_DIM)
            new_out = transformed if CACHE_SPACE else new_k
            tl.store(k_out + out_offset, new_out.to(k_out.dtype.element_ty), mask=ok & (d < KV.HEAD_DIM))
        else:
            new_v = tl.load(
                v + row * v_row_stride + token * v_token_stride + kv_head * KV.HEAD_DIM + d,
                mask=ok & (d < KV.HEAD_DIM),
                other=0.0,
            )
            transformed = to_cache_space(new_v.to(tl.float32), V_DTYPE, KV.NUM_HADAMARD)
            store_kv(transformed, v_cache, v_scale, slot, ok, V_DTYPE, KV.HEAD_DIM)
            if CACHE_SPACE:
                tl.store(v_out + out_offset, transformed.to(v_out.dtype.element_ty), mask=ok & (d < KV.HEAD_DIM))


@triton.jit(do_not_specialize=["page_table_stride", "length"])
def dequantize_kv_kernel(
    k_cache, k_scale, v_cache, v_scale, page_table, k_out, v_out, page_table_stride, length,
    KV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantise stored tokens to contiguous k_out, v_out. Program (block of tokens, head of k or v, row)."""
    K_DTYPE: tl.constexpr = KV.K_DTYPE
    V_DTYPE: tl.constexpr = KV.V_DTYPE
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tile = tl.program_id(0) * BLOCK_N
    n = tile + tl.arange(0, BLOCK_N)
    ok = n < length
    page = tl.load(page_table + row * page_table_stride + tile // KV.PAGE_SIZE).to(tl.int64)
    slot = (page * KV.PAGE_SIZE + tile % KV.PAGE_SIZE + tl.arange(0, BLOCK_N)) * KV.KV_HEADS + head % KV.KV_HEADS
    d = tl.arange(0, KV.BLOCK_D)[None, :]
    out_offset = ((row * length + n[:, None]) * KV.KV_HEADS + head % KV.KV_HEADS) * KV.HEAD_DIM + d
    mask = ok[:, None] & (d < KV.HEAD_DIM)
    if head < KV.KV_HEADS:
        x = load_kv(k_cache, k_scale, slot, ok, K_DTYPE, KV.HEAD_DIM, KV.BLOCK_D).to(tl.float32)
        if K_DTYPE != "fp8_e5m2":
            x = hadamard(x, KV.NUM_HADAMARD, True) * INV_GROUP_SIZE
        tl.store(k_out + out_offset, x.to(tl.float16).to(k_out.dtype.element_ty), mask=mask)
    else:
        x = load_kv(v_cache, v_scale, slot, ok, V_DTYPE, KV.HEAD_DIM, KV.BLOCK_D).to(tl.float32)
        if V_DTYPE != "fp8_e5m2":
            x = hadamard(x, KV.NUM_HADAMARD, True) * INV_GROUP_SIZE
        tl.store(v_out + out_offset, x.to(tl.float16).to(v_out.dtype.element_ty), mask=mask)
