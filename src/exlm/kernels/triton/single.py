"""Attention for one new token of heads that share nothing, without tensor cores: from memory into sums.

The chunks are those of `decode`, and so is the kernel that joins them. A program is one warp. N tokens at a
time stand in N lanes, each with a softmax of its own; lanes meet only at a chunk's end, so nothing waits on
the way. Heads are taken apart into groups of 32 numbers, and groups into two halves: even and odd numbers
where two share a byte, else the first and the last 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh
from .decode import chunking
from .rope import turned
from .softmax import NOTHING


@triton.jit
def columns(CODING: tl.constexpr, D: tl.constexpr):
    """(1, D / 32, 16) the places in a head of both halves' numbers."""
    g = tl.arange(0, D // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    if CODING == "hadamard4":
        return g * 32 + 2 * i, g * 32 + 2 * i + 1
    else:
        return g * 32 + i, g * 32 + i + 16


@triton.jit
def number(code, CENTRE: tl.constexpr):
    """A small code less its centre as float32: the code becomes the low bits of 2²³."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + CENTRE)


@triton.jit
def halved(codes, home, ok, CODING: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    """Two halves (N, D / 32, 16) of the stored heads at places (N, 1, 1), unscaled, as float32."""
    g = tl.arange(0, D // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    if CODING == "hadamard4":
        byte = tl.load(codes + home * (HEAD // 2) + g * 16 + i, mask=ok & (g * 32 < HEAD), other=0)
        return number(byte & 15, 8), number(byte >> 4, 8)
    else:
        d = g * 32 + i
        first = tl.load(codes + home * HEAD + d, mask=ok & (d < HEAD), other=0)
        second = tl.load(codes + home * HEAD + d + 16, mask=ok & (d + 16 < HEAD), other=0)
        if CODING == "hadamard8":
            return number(first, 128), number(second, 128)
        elif CODING == "fp8_e5m2":
            low = (first.to(tl.int16) << 8).to(tl.float16, bitcast=True)
            high = (second.to(tl.int16) << 8).to(tl.float16, bitcast=True)
            return low.to(tl.float32), high.to(tl.float32)
        else:
            return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def scaled(x, scales, home, ok, CODING: tl.constexpr, HEAD: tl.constexpr):
    """(N, G) numbers times the scale of their group of stored codes, if the codes have any."""
    if CODING == "hadamard8" or CODING == "hadamard4":
        g = tl.arange(0, x.shape[1])[None, :]
        at = tl.reshape(home, (home.shape[0], 1)) * (HEAD // 32) + g
        there = tl.reshape(ok, (ok.shape[0], 1)) & (g < HEAD // 32)
        x = x * tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    return x


@triton.jit
def scores(
    low, high, n, stop, at, home, key, key_scale, mask, factor, cap, window,
    KEYS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """(N,) scores of stored tokens n (N, 1, 1) for the query's halves (1, D / 32, 16)."""
    k_low, k_high = halved(key, home, n < stop, KEYS, HEAD, D)
    score = tl.sum(low * k_low + high * k_high, 2)
    score = tl.sum(scaled(score, key_scale, home, n < stop, KEYS, HEAD), 1) * factor
    if CAPPED:
        score = tanh(score) * cap
    lane = tl.reshape(n, (n.shape[0],))
    seen = lane < stop
    if MASKED:
        seen = seen & (tl.load(mask + lane, mask=seen, other=0) != 0)
    if WINDOW:
        seen = seen & (at - lane < window)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def places(table, tile, stop, h, KV: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr):
    """Tokens from `tile` on, and their places among all stored heads, (N, 1, 1) both."""
    n = tl.arange(0, N)[:, None, None]
    page = tl.load(table + tile // PAGE, mask=tile < stop, other=0).to(tl.int64)
    return tile + n, (page * PAGE + tile % PAGE + n) * KV + h


@triton.jit
def pass_by(
    low, high, start, stop, at, key, key_scale, value, value_scale, table, mask, h, factor, cap, window,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Each lane's unfinished softmax over its tokens from `start` to `stop`, two tiles of N at a time."""
    top = tl.full((N,), NOTHING, tl.float32)
    total = tl.zeros((N,), tl.float32)
    acc_low = tl.zeros((N, D // 32, 16), tl.float32)
    acc_high = tl.zeros((N, D // 32, 16), tl.float32)
    ones = tl.full((N, D // 32), 1.0, tl.float32)
    for tile in range(start, stop, 2 * N):
        n1, home1 = places(table, tile, stop, h, KV, PAGE, N)
        n2, home2 = places(table, tile + N, stop, h, KV, PAGE, N)
        s1 = scores(low, high, n1, stop, at, home1, key, key_scale, mask, factor, cap, window,
                    KEYS, HEAD, D, WINDOW, CAPPED, MASKED)  # fmt: skip
        s2 = scores(low, high, n2, stop, at, home2, key, key_scale, mask, factor, cap, window,
                    KEYS, HEAD, D, WINDOW, CAPPED, MASKED)  # fmt: skip
        low1, high1 = halved(value, home1, n1 < stop, VALUES, HEAD, D)
        low2, high2 = halved(value, home2, n2 < stop, VALUES, HEAD, D)
        peak = tl.maximum(top, tl.maximum(s1, s2))
        fade, p1, p2 = tl.exp2(top - peak), tl.exp2(s1 - peak), tl.exp2(s2 - peak)
        top, total = peak, total * fade + p1 + p2
        w1 = scaled(ones * p1[:, None], value_scale, home1, n1 < stop, VALUES, HEAD)[:, :, None]
        w2 = scaled(ones * p2[:, None], value_scale, home2, n2 < stop, VALUES, HEAD)[:, :, None]
        acc_low = acc_low * fade[:, None, None] + w1 * low1 + w2 * low2
        acc_high = acc_high * fade[:, None, None] + w1 * high1 + w2 * high2
    return top, total, acc_low, acc_high


@triton.jit
def newcomer(
    low, high, k, v, place, cos, sin, planes, plane_step, key, value, table, behind, h, factor, cap,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    PLANES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The same of the new token, in lane 0. Floats are turned and stored here; codes came prepared."""
    lane = tl.arange(0, N)[:, None, None]
    mine, k, v, place = lane == 0, k + lane * 0, v + lane * 0, place + lane * 0
    k_first, k_second = columns(KEYS, D)
    v_first, v_second = columns(VALUES, D)
    k_low = turned(k, k_first, place, mine, cos, sin, planes, plane_step, HEAD, DIM, PAIRS, PLANES)
    k_high = turned(k, k_second, place, mine, cos, sin, planes, plane_step, HEAD, DIM, PAIRS, PLANES)
    v_low = tl.load(v + v_first, mask=mine & (v_first < HEAD), other=0.0).to(tl.float32)
    v_high = tl.load(v + v_second, mask=mine & (v_second < HEAD), other=0.0).to(tl.float32)
    if KEYS == "float":
        page = tl.load(table + behind // PAGE).to(tl.int64)
        home = ((page * PAGE + behind % PAGE) * KV + h) * HEAD + lane * 0
        k_low, k_high = k_low.to(k.dtype.element_ty), k_high.to(k.dtype.element_ty)
        k_low, k_high = k_low.to(key.dtype.element_ty), k_high.to(key.dtype.element_ty)
        v_low, v_high = v_low.to(value.dtype.element_ty), v_high.to(value.dtype.element_ty)
        tl.store(key + home + k_first, k_low, mask=mine & (k_first < HEAD))
        tl.store(key + home + k_second, k_high, mask=mine & (k_second < HEAD))
        tl.store(value + home + v_first, v_low, mask=mine & (v_first < HEAD))
        tl.store(value + home + v_second, v_high, mask=mine & (v_second < HEAD))
        k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
        v_low, v_high = v_low.to(tl.float32), v_high.to(tl.float32)
    score = tl.sum(tl.sum(low * k_low + high * k_high, 2), 1) * factor
    if CAPPED:
        score = tanh(score) * cap
    here = tl.arange(0, N) == 0
    return tl.where(here, score, NOTHING), here.to(tl.float32), v_low, v_high


@triton.jit(do_not_specialize=["parts", "table_step", "mask_step", "window"])
def single_kernel(
    q, k, v, key, key_scale, value, value_scale, table, past, mask, cos, sin, planes, positions,
    tops, totals, answers, parts, table_step, mask_step, q_row, k_row, v_row, row_step, plane_step,
    factor, cap, window,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    PLANES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (row, head; part): every `parts`-th chunk of the row's past."""
    part, h, row = tl.program_id(1), tl.program_id(0) % KV, (tl.program_id(0) // KV).to(tl.int64)
    behind = tl.load(past + row).to(tl.int32)
    first, size, chunks = chunking(behind, window, WINDOW, SLOTS, CHUNK)
    if part >= chunks:
        return
    table += row * table_step
    mask += row * mask_step
    positions += row * row_step
    nought = tl.arange(0, 1)[:, None, None]
    heads, place = q + row * q_row + h * HEAD + nought, positions + nought
    d, e = columns(KEYS, D)
    low = turned(heads, d, place, nought == 0, cos, sin, planes, plane_step, HEAD, DIM, PAIRS, PLANES)
    high = turned(heads, e, place, nought == 0, cos, sin, planes, plane_step, HEAD, DIM, PAIRS, PLANES)
    low, high = low.to(q.dtype.element_ty).to(tl.float32), high.to(q.dtype.element_ty).to(tl.float32)
    for c in range(part, chunks, parts):
        if c < chunks - 1:
            start = first + c * size
            top, total, acc_low, acc_high = pass_by(
                low, high, start, tl.minimum(start + size, behind), behind, key, key_scale, value,
                value_scale, table, mask, h, factor, cap, window,
                KV, HEAD, D, KEYS, VALUES, WINDOW, CAPPED, MASKED, PAGE, N,
            )  # fmt: skip
        else:
            top, total, acc_low, acc_high = newcomer(
                low, high, k + row * k_row + h * HEAD, v + row * v_row + h * HEAD, positions, cos, sin,
                planes, plane_step, key, value, table, behind, h, factor, cap,
                KV, HEAD, D, DIM, PAIRS, PLANES, KEYS, VALUES, CAPPED, PAGE, N,
            )  # fmt: skip
        slot = (row * KV + h) * SLOTS + c
        leave(
            top, total, acc_low, acc_high, tops + slot, totals + slot, answers + slot * HEAD, HEAD, D, VALUES
        )


@triton.jit
def leave(
    top, total, acc_low, acc_high, at_top, at_total, at_answer, HEAD: tl.constexpr, D: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Join the lanes of a chunk and write what they make."""
    peak = tl.max(top, 0)
    share = tl.exp2(top - peak)
    tl.store(at_top, peak)
    tl.store(at_total, tl.sum(total * share, 0))
    d, e = columns(VALUES, D)
    tl.store(at_answer + d, tl.sum(acc_low * share[:, None, None], 0)[None, :, :], mask=d < HEAD)
    tl.store(at_answer + e, tl.sum(acc_high * share[:, None, None], 0)[None, :, :], mask=e < HEAD)
