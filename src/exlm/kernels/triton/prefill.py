"""Attention for many new tokens: a block of queries walks over the keys once, in pages or side by side.

Also the kernel that comes before it, which turns queries and keys and writes keys and values to their pages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import keep, prepared, recalled, spread
from .rope import turned
from .softmax import NOTHING, fold


@triton.jit(do_not_specialize=["tokens", "table_step", "row_step"])
def place_kernel(
    q, k, v, q_out, k_out, v_out, key, key_scale, value, value_scale, table, past, cos, sin, planes,
    positions, tokens, table_step, q_row, q_token, k_row, k_token, v_row, v_token, row_step, token_step,
    plane_step,
    HEADS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, PLANES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WAYS: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """A run of tokens of one head: turned (q and k), and stored (k and v). Program (run, head, row).

    INSIDE returns all three in the space of the codes, for kernels that attend there.
    """
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = t < tokens
    place = positions + row * row_step + t * token_step
    if head < HEADS:
        x = turned(q + row * q_row + t * q_token + head * HEAD, d, place, ok, cos, sin, planes, plane_step,
                   HEAD, DIM, PAIRS, PLANES)  # fmt: skip
        if INSIDE and (KEYS == "hadamard8" or KEYS == "hadamard4"):
            x = spread(x.to(q.dtype.element_ty).to(tl.float32), WAYS, False) * 0.03125
        there = ((row * tokens + t) * HEADS + head) * HEAD + d
        tl.store(q_out + there, x.to(q_out.dtype.element_ty), mask=ok & (d < HEAD))
    else:
        h = (head - HEADS) % KV
        slot = tl.load(past + row) + t
        page = tl.load(table + row * table_step + slot // PAGE, mask=ok, other=0).to(tl.int64)
        home = (page * PAGE + slot % PAGE) * KV + h
        there = ((row * tokens + t) * KV + h) * HEAD + d
        if head < HEADS + KV:
            new_k = turned(k + row * k_row + t * k_token + h * HEAD, d, place, ok, cos, sin, planes,
                           plane_step, HEAD, DIM, PAIRS, PLANES)  # fmt: skip
            new_k = new_k.to(k.dtype.element_ty).to(tl.float32)
            inner = prepared(new_k, KEYS, WAYS)
            keep(inner, key, key_scale, home, ok, KEYS, HEAD)
            outer = inner if INSIDE else new_k
            tl.store(k_out + there, outer.to(k_out.dtype.element_ty), mask=ok & (d < HEAD))
        else:
            new_v = tl.load(v + row * v_row + t * v_token + h * HEAD + d, mask=ok & (d < HEAD), other=0.0)
            coded = prepared(new_v.to(tl.float32), VALUES, WAYS)
            keep(coded, value, value_scale, home, ok, VALUES, HEAD)
            if INSIDE:
                tl.store(v_out + there, coded.to(v_out.dtype.element_ty), mask=ok & (d < HEAD))


@triton.jit(do_not_specialize=["table_step", "length"])
def recall_kernel(
    key, key_scale, value, value_scale, table, k_out, v_out, table_step, length,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WAYS: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A run of stored tokens of one head, decoded: program (run, head of k or v, row)."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tile = tl.program_id(0) * N
    n = tile + tl.arange(0, N)
    ok = n < length
    page = tl.load(table + row * table_step + tile // PAGE).to(tl.int64)
    home = (page * PAGE + tile % PAGE + tl.arange(0, N)) * KV + head % KV
    d = tl.arange(0, D)[None, :]
    there = ((row * length + n[:, None]) * KV + head % KV) * HEAD + d
    mask = ok[:, None] & (d < HEAD)
    if head < KV:
        x = recalled(key, key_scale, home, ok, KEYS, HEAD, D).to(tl.float32)
        if KEYS != "fp8_e5m2":
            x = spread(x, WAYS, True) * 0.03125
        tl.store(k_out + there, x.to(tl.float16).to(k_out.dtype.element_ty), mask=mask)
    else:
        x = recalled(value, value_scale, home, ok, VALUES, HEAD, D).to(tl.float32)
        if VALUES != "fp8_e5m2":
            x = spread(x, WAYS, True) * 0.03125
        tl.store(v_out + there, x.to(tl.float16).to(v_out.dtype.element_ty), mask=mask)


@triton.jit
def stride_over(
    q, at, start, stop, end, k, v, k_token, v_token, table, mask, top, total, acc, factor, cap, window,
    HEAD: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    PAGE: tl.constexpr, EDGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Fold keys `start` to `stop` into the softmax of queries at (M, 1); EDGE: some are not to be seen."""
    d = tl.arange(0, D)[None, :]
    for tile in range(start, stop, N):
        n = tile + tl.arange(0, N)
        home = n.to(tl.int64)
        if PAGE > 0:
            home = tl.load(table + tile // PAGE).to(tl.int64) * PAGE + tile % PAGE + tl.arange(0, N)
        if EDGE or D != HEAD:
            inside = (d < HEAD) & (n < end)[:, None]
            new_k = tl.load(k + home[:, None] * k_token + d, mask=inside, other=0.0).to(q.dtype)
            new_v = tl.load(v + home[:, None] * v_token + d, mask=inside, other=0.0).to(q.dtype)
        else:
            new_k = tl.load(k + home[:, None] * k_token + d).to(q.dtype)
            new_v = tl.load(v + home[:, None] * v_token + d).to(q.dtype)
        seen = (n >= 0)[None, :]
        if EDGE:
            seen = n[None, :] <= at
            if WINDOW:
                seen = seen & (at - n[None, :] < window)
        if MASKED:
            seen = seen & ((tl.load(mask + n, mask=n < end, other=0) != 0)[None, :] | (n[None, :] == at))
        top, total, acc = fold(q, new_k, new_v, seen, top, total, acc, factor, cap, CAPPED,
                               not EDGE and not MASKED)  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["tokens", "table_step", "mask_step", "window"])
def flash_kernel(
    q, k, v, table, past, mask, out, tokens, table_step, mask_step, q_row, q_token, k_row, k_token, v_row,
    v_token, factor, cap, window,
    HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A block of M queries of one head: program (block from the last on, head, row)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    behind = tl.load(past + row).to(tl.int32)
    t = block * M + tl.arange(0, M)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = (t < tokens) & (d < HEAD)
    x = tl.load(q + row * q_row + t.to(tl.int64) * q_token + head * HEAD + d, mask=ok, other=0.0)
    k += row * k_row + (head // SHARE) * HEAD
    v += row * v_row + (head // SHARE) * HEAD
    table += row * table_step
    mask += row * mask_step
    at = behind + t
    end = behind + tokens
    low = behind + block * M  # where the first query stands
    first, whole = low * 0, low // N * N  # tiles from `first` on matter; those before `whole` all queries see
    if WINDOW:
        first = tl.maximum(low - window + 1, 0) // N * N
        whole = first
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    top, total, acc = stride_over(
        x, at, first, whole, end, k, v, k_token, v_token, table, mask, top, total, acc, factor, cap, window,
        HEAD, D, WINDOW, CAPPED, MASKED, PAGE, False, N,
    )  # fmt: skip
    top, total, acc = stride_over(
        x, at, whole, tl.minimum(low + M, end), end, k, v, k_token, v_token, table, mask, top, total, acc,
        factor, cap, window, HEAD, D, WINDOW, CAPPED, MASKED, PAGE, True, N,
    )  # fmt: skip
    there = ((row * tokens + t) * HEADS + head) * HEAD + d
    tl.store(
        out + there, (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=ok
    )
