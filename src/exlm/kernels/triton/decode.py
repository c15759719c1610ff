"""Attention for a few new tokens behind a long past, all in one launch and a short second one.

A row's past is cut into chunks by its own length alone. `split_kernel` gives each (row, kv head) some
programs, each of which takes every n-th chunk and leaves its softmax unfinished; `join_kernel` adds the
chunks up in order. So a row's answer is the same, bit for bit, in any batch, with any page table and any
number of programs. The new tokens are the last chunk, seen as they came. Among floats, its program turns the
keys and writes them and the values to their pages; codes take a launch of their own before. Nothing on the
host depends on how long the rows are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import recalled, spread
from .rope import turned
from .softmax import NOTHING, fold

NEW = tl.constexpr(16)  # the most new tokens a row may have


@triton.jit
def chunking(past, window, WINDOW: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """The first key any query may see, the tokens of a chunk (both multiples of CHUNK), and how many chunks.

    The last chunk is the new tokens', so that nobody waits for a past and for them.
    """
    first = past * 0
    if WINDOW:
        first = tl.maximum(past - window + 1, 0) // CHUNK * CHUNK
    span = past - first
    size = tl.maximum(tl.cdiv(tl.cdiv(span, SLOTS - 1), CHUNK) * CHUNK, CHUNK)
    return first, size, tl.cdiv(span, size) + 1


@triton.jit
def walk(
    q, at, start, stop, key, key_scale, value, value_scale, table, mask, h, factor, cap, window,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The unfinished softmax of queries at positions (M, 1) over stored tokens `start` to `stop`."""
    M: tl.constexpr = q.shape[0]
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for tile in range(start, stop, N):
        n = tile + tl.arange(0, N)
        ok = n < stop
        page = tl.load(table + tile // PAGE).to(tl.int64)
        home = (page * PAGE + tile % PAGE + tl.arange(0, N)) * KV + h
        k = recalled(key, key_scale, home, ok, KEYS, HEAD, D).to(q.dtype)
        v = recalled(value, value_scale, home, ok, VALUES, HEAD, D).to(q.dtype)
        seen = ok[None, :]
        if MASKED:
            seen = seen & (tl.load(mask + n, mask=ok, other=0) != 0)[None, :]
        if WINDOW:
            seen = seen & (at - n[None, :] < window)
        top, total, acc = fold(q, k, v, seen, top, total, acc, factor, cap, CAPPED)
    return top, total, acc


@triton.jit
def fresh(
    k, v, place, cos, sin, planes, k_token, v_token, token_step, plane_step, tokens, past, h, key, value,
    table, write,
    KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    PLANES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A row's new keys and values, (NEW, D) each. Floats are turned and stored here; codes came prepared."""
    t = tl.arange(0, NEW)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = t < tokens
    new_k = turned(k + t * k_token + h * HEAD, d, place + t * token_step, ok, cos, sin, planes, plane_step,
                   HEAD, DIM, PAIRS, PLANES).to(k.dtype.element_ty)  # fmt: skip
    new_v = tl.load(v + t * v_token + h * HEAD + d, mask=ok & (d < HEAD), other=0.0)
    if KEYS == "float":
        new_k, new_v = new_k.to(key.dtype.element_ty), new_v.to(value.dtype.element_ty)
        if write:
            page = tl.load(table + (past + t) // PAGE, mask=ok, other=0).to(tl.int64)
            home = ((page * PAGE + (past + t) % PAGE) * KV + h) * HEAD + d
            tl.store(key + home, new_k, mask=ok & (d < HEAD))
            tl.store(value + home, new_v, mask=ok & (d < HEAD))
    return new_k, new_v


@triton.jit(do_not_specialize=["tokens", "parts", "table_step", "mask_step", "window"])
def split_kernel(
    q, k, v, key, key_scale, value, value_scale, table, past, mask, cos, sin, planes, positions,
    tops, totals, answers, tokens, parts, table_step, mask_step,
    q_row, q_token, k_row, k_token, v_row, v_token, row_step, token_step, plane_step, factor, cap, window,
    KV: tl.constexpr, SHARE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, PLANES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (row, block of M queries, kv head; part): every `parts`-th chunk of the row's past."""
    pid, part = tl.program_id(0), tl.program_id(1)
    h, blocks = pid % KV, tl.cdiv(tokens * SHARE, M)
    block, row = pid // KV % blocks, (pid // KV // blocks).to(tl.int64)
    behind = tl.load(past + row).to(tl.int32)
    first, size, chunks = chunking(behind, window, WINDOW, SLOTS, CHUNK)
    if part >= chunks:
        return
    table += row * table_step
    mask += row * mask_step
    positions += row * row_step
    m = block * M + tl.arange(0, M)
    t, head = m // SHARE, h * SHARE + m % SHARE
    live = t < tokens
    d = tl.arange(0, D)[None, :]
    heads = q + row * q_row + (t * q_token + head * HEAD)[:, None]
    x = turned(heads, d, positions + (t * token_step)[:, None], live[:, None], cos, sin, planes, plane_step,
               HEAD, DIM, PAIRS, PLANES)  # fmt: skip
    x = x.to(q.dtype.element_ty)
    at = (behind + t)[:, None]
    slot = ((row * tokens + t) * (KV * SHARE) + head) * SLOTS
    for c in range(part, chunks, parts):
        start = first + c * size
        top, total, acc = walk(
            x, at, start, tl.minimum(start + size, behind), key, key_scale, value, value_scale, table, mask,
            h, factor, cap, window, KV, HEAD, D, KEYS, VALUES, WINDOW, CAPPED, MASKED, PAGE, N,
        )  # fmt: skip
        if c == chunks - 1:
            new_k, new_v = fresh(
                k + row * k_row, v + row * v_row, positions, cos, sin, planes, k_token, v_token, token_step,
                plane_step, tokens, behind, h, key, value, table, block == 0,
                KV, HEAD, D, DIM, PAIRS, PLANES, KEYS, PAGE,
            )  # fmt: skip
            seen = newer(t[:, None], behind, tokens, mask, window, WINDOW, MASKED)
            top, total, acc = fold(x, new_k.to(x.dtype), new_v.to(x.dtype), seen, top, total, acc, factor,
                                   cap, CAPPED)  # fmt: skip
        tl.store(tops + slot + c, top, mask=live)
        tl.store(totals + slot + c, total, mask=live)
        tl.store(answers + (slot + c)[:, None] * HEAD + d, acc, mask=live[:, None] & (d < HEAD))


@triton.jit
def newer(t, behind, tokens, mask, window, WINDOW: tl.constexpr, MASKED: tl.constexpr):
    """(M, NEW) which new tokens the queries at t (M, 1) see: those before, and always themselves."""
    n = tl.arange(0, NEW)[None, :]
    seen = (n <= t) & (n < tokens)
    if WINDOW:
        seen = seen & (t - n < window)
    if MASKED:
        shown = tl.load(mask + behind + n, mask=n < tokens, other=0) != 0
        seen = seen & (shown | (n == t))
    return seen


@triton.jit(do_not_specialize=["tokens", "window"])
def join_kernel(
    tops, totals, answers, past, out, tokens, window,
    HEADS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, WAYS: tl.constexpr,
    WINDOW: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One query of one head: its chunks, added up in order."""
    query = tl.program_id(0).to(tl.int64)
    behind = tl.load(past + query // HEADS // tokens).to(tl.int32)
    _, _, chunks = chunking(behind, window, WINDOW, SLOTS, CHUNK)
    c, d = tl.arange(0, SLOTS), tl.arange(0, D)[None, :]
    used = c < chunks
    top = tl.load(tops + query * SLOTS + c, mask=used, other=NOTHING)
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(totals + query * SLOTS + c, mask=used, other=0.0) * share, 0)
    ok = used[:, None] & (d < HEAD)
    parts = tl.load(answers + (query * SLOTS + c)[:, None] * HEAD + d, mask=ok, other=0.0)
    x = (tl.sum(parts * share[:, None], 0) / total)[None, :]
    if ROTATED:
        x = spread(x, WAYS, False) * 0.03125
    tl.store(out + query * HEAD + d, x.to(out.dtype.element_ty), mask=d < HEAD)
