"""Sampling kernels, first part: the edits of logits before the softmax, for a span of one row.

`exlm.sampling.logits_processors` defines the results. A program copies its span of the row and edits the
copy. Penalties read a list of the text's tokens and their counts, which stays on the device and is updated by
one token at a time; DRY searches the text itself, which is on the device too. A program writes only the
columns of its own span, so no program waits for another. Last it stores the maximum of each block of columns,
which `sampling_draw` reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import sampling_layout as layout
from .sampling_topk import VOCAB_BLOCK, load_logits, masked_keys

HEADER_STRIDE, PARAM_STRIDE = tl.constexpr(layout.HEADER_WORDS), tl.constexpr(layout.PARAM_WIDTH)
AT_COUNTS, AT_NEW_COUNTS, AT_DECAY, AT_BLOCKED, AT_BIAS, AT_ALLOWED, AT_HISTORY, AT_BREAKERS = (
    tl.constexpr(layout.HEADER_OFFSETS[name])
    for name in (
        "token_counts", "new_counts", "decaying", "blocked", "bias", "allowed", "history", "dry_breakers"
    )
)  # fmt: skip
PENALTY_COLUMN, MULTIPLIER_COLUMN, BASE_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("token_repetition_penalty", "dry_multiplier", "dry_base")
)
ALLOWED_LENGTH_COLUMN, MAX_MATCH_COLUMN, SEARCH_RANGE_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("dry_allowed_length", "dry_max_ngram", "dry_range")
)
BLOCKED_LOGIT = tl.constexpr(layout.BLOCKED_LOGIT)
MAX_DRY_PENALTY = tl.constexpr(layout.MAX_DRY_PENALTY)
LIST_TILE = tl.constexpr(1024)  # entries of a list that are loaded together
MATCH_TILE = tl.constexpr(32)  # tokens at the end of a text that are loaded together
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def store_token_counts(words, token_counts, start, count):
    """Write a new list of (token, count). Every program of a row writes the same."""
    for first in range(0, 2 * count, LIST_TILE):
        i = first + tl.arange(0, LIST_TILE)
        tl.store(token_counts + i, tl.load(words + start + i, mask=i < 2 * count).to(tl.int32), mask=i < 2 * count)
    tl.debug_barrier()


@triton.jit
def update_token_count(token_counts, size, token, change):
    """Add `change` to the count of a token; a token that is not listed gets the last entry."""
    missing = tl.full([], 1, tl.int32)
    for first in range(0, size, LIST_TILE):
        i = first + tl.arange(0, LIST_TILE)
        is_token = tl.load(token_counts + i * 2, mask=i < size, other=-1) == token
        counts = tl.load(token_counts + i * 2 + 1, mask=is_token, other=0)
        tl.store(token_counts + i * 2 + 1, counts + change, mask=is_token)
        missing -= tl.max(is_token.to(tl.int32))
    if missing > 0:
        tl.store(token_counts + size * 2 - 2, token.to(tl.int32))
        tl.store(token_counts + size * 2 - 1, change)
    tl.debug_barrier()


@triton.jit
def apply_penalty(x, y, low, high, tokens, counts, strengths, rates):
    """Write the penalised logits of those tokens that occur and are between two columns."""
    in_span = (tokens >= low) & (tokens < high) & (counts > 0)
    old = tl.load(x + tokens, mask=in_span, other=0.0).to(tl.float32)
    repetition = tl.load(rates).to(tl.float32)
    frequency, presence = tl.load(rates + 1).to(tl.float32), tl.load(rates + 2).to(tl.float32)
    factor = 1.0 + (repetition - 1.0) * strengths
    factor = tl.where(strengths == 1.0, repetition, factor)
    new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
    tl.store(y + tokens, new - (frequency * counts + presence * strengths), mask=in_span)


@triton.jit
def apply_penalties(x, y, low, high, header, words, rates):
    """Update the list on the device, and penalise its tokens and those whose penalties decay."""
    token_counts, size = (tl.load(header + AT_COUNTS).to(tl.pointer_type(tl.int32)), tl.load(header + AT_COUNTS + 1))
    store_token_counts(words, token_counts, tl.load(header + AT_NEW_COUNTS), tl.load(header + AT_NEW_COUNTS + 1))
    entered, left = tl.load(header + AT_COUNTS + 2), tl.load(header + AT_COUNTS + 3)
    if (size > 0) & (entered >= low) & (entered < high):
        update_token_count(token_counts, size, entered, 1)
    if (size > 0) & (left >= low) & (left < high):
        update_token_count(token_counts, size, left, -1)
    for first in range(0, size, LIST_TILE):
        i = first + tl.arange(0, LIST_TILE)
        tokens = tl.load(token_counts + i * 2, mask=i < size, other=-1)
        counts = tl.load(token_counts + i * 2 + 1, mask=i < size, other=0).to(tl.float32)
        apply_penalty(x, y, low, high, tokens, counts, tl.full([LIST_TILE], 1.0, tl.float32), rates)
    decaying, count = words + tl.load(header + AT_DECAY), tl.load(header + AT_DECAY + 1)
    for first in range(0, count, LIST_TILE):
        i = first + tl.arange(0, LIST_TILE)
        tokens = tl.load(decaying + i, mask=i < count, other=-1)
        counts, strengths = (
            load_float64_bits(decaying + count, i, count),
            load_float64_bits(decaying + 2 * count, i, count),
        )
        apply_penalty(x, y, low, high, tokens, counts, strengths, rates)
    tl.debug_barrier()


@triton.jit
def load_float64_bits(words, i, count):
    """Words that hold the bits of float64 numbers, as float32."""
    bits = tl.load(words + i, mask=i < count, other=0)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def apply_blocked(y, low, high, tokens, count):
    """Set the logits of blocked tokens to BLOCKED_LOGIT."""
    for first in range(0, count, LIST_TILE):
        i = first + tl.arange(0, LIST_TILE)
        token = tl.load(tokens + i, mask=i < count, other=-1)
        tl.store(y + token, tl.full([LIST_TILE], BLOCKED_LOGIT, tl.float32), mask=(token >= low) & (token < high))
    tl.debug_barrier()


@triton.jit
def prefetch_logits(x, columns, width, end):
    """The columns of a tile, loaded before they are needed; 0 beyond the end of a span."""
    return tl.load(x + columns, mask=(columns < width) & (columns < end), other=0.0).to(tl.float32)


@triton.jit
def copy_logits(x, y, low, end, width, TILE: tl.constexpr):
    """Copy the logits of a span."""
    columns = tl.arange(0, TILE)
    v = prefetch_logits(x, low + columns, width, end)
    for start in range(low, end, TILE):
        next_v = prefetch_logits(x, start + TILE + columns, width, end)
        tl.store(y + start + columns, v, mask=start + columns < width)
        v = next_v
    tl.debug_barrier()


@triton.jit
def apply_bias(y, low, end, width, address, TILE: tl.constexpr):
    """Add the bias to the logits of a span."""
    if address != 0:
        bias = address.to(tl.pointer_type(tl.float32))
        for start in range(low, end, TILE):
            columns = start + tl.arange(0, TILE)
            v = load_logits(y, columns, width) + load_logits(bias, columns, width)
            tl.store(y + columns, v, mask=columns < width)
        tl.debug_barrier()


@triton.jit
def apply_allowed_mask(y, low, end, width, words, at, TILE: tl.constexpr):
    """Exclude the tokens that a bitmask does not allow."""
    if at != 0:
        for start in range(low, end, TILE):
            columns = start + tl.arange(0, TILE)
            in_row = columns < width
            bits = tl.load(words + at + columns // 64, mask=in_row, other=0) >> (columns % 64).to(tl.int64)
            tl.store(y + columns, tl.full([TILE], float("-inf"), tl.float32), mask=in_row & ((bits & 1) == 0))
        tl.debug_barrier()


@triton.jit
def store_block_maxima(x, maxima, low, end, width, TILE: tl.constexpr):
    """Store the key of the maximum of every block of a span."""
    blocks = tl.arange(0, TILE // VOCAB_BLOCK)
    columns = blocks[:, None] * VOCAB_BLOCK + tl.arange(0, VOCAB_BLOCK)[None, :]
    v = prefetch_logits(x, low + columns, width, end)
    for start in range(low, end, TILE):
        next_v = prefetch_logits(x, start + TILE + columns, width, end)
        tl.store(maxima + start // VOCAB_BLOCK + blocks, tl.max(masked_keys(v, start + columns, width), 1))
        v = next_v


@triton.jit
def is_matchable(tokens, breaker_mask):
    """Which tokens may be in a match or follow one; `breaker_mask` is an address, 0 for none."""
    known = tokens >= 0
    is_breaker = tl.load(breaker_mask.to(tl.pointer_type(tl.int8)) + tokens, mask=known & (breaker_mask != 0), other=0)
    return known & (is_breaker == 0)


@triton.jit
def store_last_token(ids, count, token, width):
    """Write the last token of a text. Every program of a row writes the same."""
    if count > 0:
        known = (token >= 0) & (token < width)
        tl.store(ids + count - 1, tl.where(known, token, NO_TOKEN).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def max_match_length(ids, count, limit, breaker_mask):
    """How many of a text's last tokens a match can have, at most `limit`."""
    length, end = tl.full([], 0, tl.int32), limit
    while length < end:
        offsets = tl.arange(0, MATCH_TILE)
        in_range = length + offsets < limit
        tokens = tl.load(ids + count - 1 - length - offsets, mask=in_range, other=NO_TOKEN)
        first = tl.min(tl.where(is_matchable(tokens, breaker_mask), MATCH_TILE, offsets))
        length += first
        end = tl.where(first < MATCH_TILE, length, limit)
    return length


@triton.jit
def match_lengths(ids, positions, count, start, limit):
    """How many tokens up to each position equal those at the end of the text, at most `limit`."""
    lengths, any_matching = positions * 0, limit
    matching = (positions < count - 1).to(tl.int32)
    for distance in range(limit):
        if any_matching > 0:
            earlier = positions - distance
            token = tl.load(ids + count - 1 - distance)
            earlier_token = tl.load(ids + earlier, mask=(matching > 0) & (earlier >= start), other=NO_TOKEN)
            matching = tl.where(earlier_token == token, matching, 0)
            lengths += matching
            any_matching = tl.max(matching)
    return lengths


@triton.jit
def next_tokens(ids, positions, count, breaker_mask):
    """The tokens after some positions, NO_TOKEN where they cannot continue a match."""
    tokens = tl.load(ids + positions + 1, mask=positions < count - 1, other=NO_TOKEN)
    return tl.where(is_matchable(tokens, breaker_mask), tokens, NO_TOKEN)


@triton.jit
def apply_dry(y, counts, low, high, width, header, params, TILE: tl.constexpr):
    """Subtract DRY's penalties from the logits of a span; `counts` (width,) are 0 before and after."""
    address, breaker_mask = tl.load(header + AT_HISTORY), tl.load(header + AT_BREAKERS)
    if address != 0:
        ids, count = address.to(tl.pointer_type(tl.int32)), tl.load(header + AT_HISTORY + 1).to(tl.int32)
        store_last_token(ids, count, tl.load(header + AT_HISTORY + 2), width)
        window = tl.minimum(tl.load(params + SEARCH_RANGE_COLUMN), count).to(tl.int32)
        start = tl.where(window > 0, count - window, 0)
        limit = tl.minimum(tl.load(params + MAX_MATCH_COLUMN), count - start).to(tl.int32)
        limit = max_match_length(ids, count, limit, breaker_mask)
        best, offsets = tl.full([], 0, tl.int32), tl.arange(0, TILE)
        for first in range(start, count - 1, TILE):
            lengths = match_lengths(ids, first + offsets, count, start, limit)
            tokens = next_tokens(ids, first + offsets, count, breaker_mask)
            best = tl.maximum(best, tl.max(tl.where(tokens >= 0, lengths, 0)))
        allowed = tl.load(params + ALLOWED_LENGTH_COLUMN).to(tl.int32)
        if best >= tl.maximum(allowed, 1):
            power = (best - allowed).to(tl.float64) * tl.log(tl.load(params + BASE_COLUMN))
            penalty_per_match = tl.minimum(tl.load(params + MULTIPLIER_COLUMN) * tl.exp(power), MAX_DRY_PENALTY)
            for first in range(start, count - 1, TILE):
                lengths = match_lengths(ids, first + offsets, count, start, best)
                tokens = next_tokens(ids, first + offsets, count, breaker_mask)
                in_span = (lengths >= best) & (tokens >= low) & (tokens < high)
                tl.atomic_add(counts + tokens, 1, mask=in_span, sem="relaxed")
            tl.debug_barrier()
            for first in range(start, count - 1, TILE):
                lengths = match_lengths(ids, first + offsets, count, start, best)
                tokens = next_tokens(ids, first + offsets, count, breaker_mask)
                in_span = (lengths >= best) & (tokens >= low) & (tokens < high)
                num_matches = tl.atomic_xchg(counts + tokens, 0, mask=in_span, sem="relaxed")
                in_span = in_span & (num_matches > 0)
                penalty = tl.minimum(penalty_per_match * num_matches, MAX_DRY_PENALTY).to(tl.float32)
                tl.store(y + tokens, tl.load(y + tokens, mask=in_span, other=0.0) - penalty, mask=in_span)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["blocks_per_row", "tiles_per_program"])
def edit_logits_kernel(
    x, table, words, stride, y, maxima, counts, blocks_per_row, tiles_per_program, width,
    TILE: tl.constexpr, EDIT: tl.constexpr, DRY: tl.constexpr,
):  # fmt: skip
    """Edit a copy of a span of a row if EDIT, in the order of the steps; then store the block maxima.

    EDIT is set if any row's logits are edited, DRY if any row uses DRY.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * tiles_per_program
    low, end = first * TILE, tl.minimum(first + tiles_per_program, tl.cdiv(width, TILE)) * TILE
    high = tl.minimum(end, width)
    header = words + row * HEADER_STRIDE
    x += tl.load(header) * stride
    maxima += row * blocks_per_row
    if EDIT:
        y += row * width
        params = table + row * PARAM_STRIDE
        copy_logits(x, y, low, end, width, TILE)
        apply_penalties(x, y, low, high, header, words, params + PENALTY_COLUMN)
        apply_blocked(y, low, high, words + tl.load(header + AT_BLOCKED), tl.load(header + AT_BLOCKED + 1))
        apply_bias(y, low, end, width, tl.load(header + AT_BIAS), TILE)
        if DRY:
            apply_dry(y, counts + row * width, low, high, width, header, params, LIST_TILE)
        apply_allowed_mask(y, low, end, width, words, tl.load(header + AT_ALLOWED), TILE)
        store_block_maxima(y, maxima, low, end, width, TILE)
    else:
        store_block_maxima(x, maxima, low, end, width, TILE)
