"""DRY: what would prolong the longest earlier copy of a text's end is made less likely, by how long that is.

What is right is defined by `dry.py`. The text lies on the device and is searched whole; a program changes the
logits of its own columns alone. How often a token would come after such copies is counted in integers, and
whoever fetches the count first settles it, so the order in which threads come does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import dry
from ..kernel_params import HEADER_OFFSETS, TABLE_COLUMNS

AT_HISTORY, AT_BREAKERS = (
    tl.constexpr(HEADER_OFFSETS["history"]),
    tl.constexpr(HEADER_OFFSETS["dry_breakers"]),
)
MULTIPLIER_COLUMN, BASE_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("dry_multiplier", "dry_base")
)
ALLOWED_LENGTH_COLUMN, MAX_MATCH_COLUMN, SEARCH_RANGE_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name])
    for name in ("dry_allowed_length", "dry_max_match_length", "dry_search_range")
)
MAX_PENALTY = tl.constexpr(dry.MAX_PENALTY)
MATCH_TILE = tl.constexpr(32)  # tokens at the end of a text that are looked at together
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def is_matchable(tokens, breaker_mask):
    """Which tokens may be in a match or follow one; `breakers` is an address, 0 for none."""
    known = tokens >= 0
    breaks = tl.load(
        breaker_mask.to(tl.pointer_type(tl.int8)) + tokens, mask=known & (breaker_mask != 0), other=0
    )
    return known & (breaks == 0)


@triton.jit
def store_last_token(ids, count, token, width):
    """Write the last token of a text. Every program of a row does, the same."""
    if count > 0:
        known = (token >= 0) & (token < width)
        tl.store(ids + count - 1, tl.where(known, token, NO_TOKEN).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def max_match_length(ids, count, limit, breaker_mask):
    """How many of a text's last tokens a match can have, `limit` at most."""
    length, more = tl.full([], 0, tl.int32), limit
    while length < more:
        lane = tl.arange(0, MATCH_TILE)
        inside = length + lane < limit
        tokens = tl.load(ids + count - 1 - length - lane, mask=inside, other=NO_TOKEN)
        first = tl.min(tl.where(is_matchable(tokens, breaker_mask), MATCH_TILE, lane))
        length += first
        more = tl.where(first < MATCH_TILE, length, limit)
    return length


@triton.jit
def match_lengths(ids, places, count, start, limit):
    """How long a copy of the text's end stands before and at each of some places, `limit` at most."""
    found, any_alive = places * 0, limit
    alive = (places < count - 1).to(tl.int32)
    for distance in range(limit):
        if any_alive > 0:
            position = places - distance
            token = tl.load(ids + count - 1 - distance)
            earlier_token = tl.load(ids + position, mask=(alive > 0) & (position >= start), other=NO_TOKEN)
            alive = tl.where(earlier_token == token, alive, 0)
            found += alive
            any_alive = tl.max(alive)
    return found


@triton.jit
def next_tokens(ids, places, count, breaker_mask):
    """What follows some places, NO_TOKEN where it does not count."""
    tokens = tl.load(ids + places + 1, mask=places < count - 1, other=NO_TOKEN)
    return tl.where(is_matchable(tokens, breaker_mask), tokens, NO_TOKEN)


@triton.jit
def apply_dry(y, counts, low, high, width, header, params, TILE: tl.constexpr):
    """Take DRY's costs from the logits between two columns; `counts` (width,) are 0 before and after."""
    address, breaker_mask = tl.load(header + AT_HISTORY), tl.load(header + AT_BREAKERS)
    if address != 0:
        ids, count = address.to(tl.pointer_type(tl.int32)), tl.load(header + AT_HISTORY + 1).to(tl.int32)
        store_last_token(ids, count, tl.load(header + AT_HISTORY + 2), width)
        window = tl.minimum(tl.load(params + SEARCH_RANGE_COLUMN), count).to(tl.int32)
        start = tl.where(window > 0, count - window, 0)
        limit = tl.minimum(tl.load(params + MAX_MATCH_COLUMN), count - start).to(tl.int32)
        limit = max_match_length(ids, count, limit, breaker_mask)
        best, lane = tl.full([], 0, tl.int32), tl.arange(0, TILE)
        for first in range(start, count - 1, TILE):
            found = match_lengths(ids, first + lane, count, start, limit)
            tokens = next_tokens(ids, first + lane, count, breaker_mask)
            best = tl.maximum(best, tl.max(tl.where(tokens >= 0, found, 0)))
        allowed = tl.load(params + ALLOWED_LENGTH_COLUMN).to(tl.int32)
        if best >= tl.maximum(allowed, 1):
            power = (best - allowed).to(tl.float64) * tl.log(tl.load(params + BASE_COLUMN))
            cost_per_match = tl.minimum(tl.load(params + MULTIPLIER_COLUMN) * tl.exp(power), MAX_PENALTY)
            for first in range(start, count - 1, TILE):
                found = match_lengths(ids, first + lane, count, start, best)
                tokens = next_tokens(ids, first + lane, count, breaker_mask)
                in_span = (found >= best) & (tokens >= low) & (tokens < high)
                tl.atomic_add(counts + tokens, 1, mask=in_span, sem="relaxed")
            tl.debug_barrier()
            for first in range(start, count - 1, TILE):
                found = match_lengths(ids, first + lane, count, start, best)
                tokens = next_tokens(ids, first + lane, count, breaker_mask)
                in_span = (found >= best) & (tokens >= low) & (tokens < high)
                many = tl.atomic_xchg(counts + tokens, 0, mask=in_span, sem="relaxed")
                in_span = in_span & (many > 0)
                cost = tl.minimum(cost_per_match * many, MAX_PENALTY).to(tl.float32)
                tl.store(y + tokens, tl.load(y + tokens, mask=in_span, other=0.0) - cost, mask=in_span)
            tl.debug_barrier()
