"""DRY: what would prolong the longest earlier copy of a text's end is made less likely, by how long that is.

What is right is defined by `dry.py`. The text lies on the device and is searched whole; a program changes the
logits of its own columns alone. How often a token would come after such copies is counted in integers, and
whoever fetches the count first settles it, so the order in which threads come does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import dry
from ..lanes import AT, COLUMNS

TEXT, BREAKERS = tl.constexpr(AT["text"]), tl.constexpr(AT["breakers"])
AT_MULTIPLIER, AT_BASE = (tl.constexpr(COLUMNS[name]) for name in ("dry_multiplier", "dry_base"))
AT_ALLOWED, AT_LONGEST, AT_WINDOW = (
    tl.constexpr(COLUMNS[name]) for name in ("dry_allowed", "dry_longest", "dry_window")
)
LARGEST = tl.constexpr(dry.LARGEST_PENALTY)
STRETCH = tl.constexpr(32)  # tokens at the end of a text that are looked at together
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def countable(tokens, breakers):
    """Which tokens may be in a match or follow one; `breakers` is an address, 0 for none."""
    known = tokens >= 0
    breaks = tl.load(breakers.to(tl.pointer_type(tl.int8)) + tokens, mask=known & (breakers != 0), other=0)
    return known & (breaks == 0)


@triton.jit
def append(ids, count, token, width):
    """Write the last token of a text. Every program of a row does, the same."""
    if count > 0:
        known = (token >= 0) & (token < width)
        tl.store(ids + count - 1, tl.where(known, token, NO_TOKEN).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def longest_match(ids, count, limit, breakers):
    """How many of a text's last tokens a match can have, `limit` at most."""
    length, more = tl.full([], 0, tl.int32), limit
    while length < more:
        lane = tl.arange(0, STRETCH)
        inside = length + lane < limit
        tokens = tl.load(ids + count - 1 - length - lane, mask=inside, other=NO_TOKEN)
        first = tl.min(tl.where(countable(tokens, breakers), STRETCH, lane))
        length += first
        more = tl.where(first < STRETCH, length, limit)
    return length


@triton.jit
def matches(ids, places, count, start, limit):
    """How long a copy of the text's end stands before and at each of some places, `limit` at most."""
    found, some = places * 0, limit
    alive = (places < count - 1).to(tl.int32)
    for back in range(limit):
        if some > 0:
            there = places - back
            token = tl.load(ids + count - 1 - back)
            near = tl.load(ids + there, mask=(alive > 0) & (there >= start), other=NO_TOKEN)
            alive = tl.where(near == token, alive, 0)
            found += alive
            some = tl.max(alive)
    return found


@triton.jit
def following(ids, places, count, breakers):
    """What follows some places, NO_TOKEN where it does not count."""
    tokens = tl.load(ids + places + 1, mask=places < count - 1, other=NO_TOKEN)
    return tl.where(countable(tokens, breakers), tokens, NO_TOKEN)


@triton.jit
def discourage(y, counts, low, high, width, head, t, TILE: tl.constexpr):
    """Take DRY's costs from the logits between two columns; `counts` (width,) are 0 before and after."""
    address, breakers = tl.load(head + TEXT), tl.load(head + BREAKERS)
    if address != 0:
        ids, count = address.to(tl.pointer_type(tl.int32)), tl.load(head + TEXT + 1).to(tl.int32)
        append(ids, count, tl.load(head + TEXT + 2), width)
        window = tl.minimum(tl.load(t + AT_WINDOW), count).to(tl.int32)
        start = tl.where(window > 0, count - window, 0)
        limit = tl.minimum(tl.load(t + AT_LONGEST), count - start).to(tl.int32)
        limit = longest_match(ids, count, limit, breakers)
        best, lane = tl.full([], 0, tl.int32), tl.arange(0, TILE)
        for first in range(start, count - 1, TILE):
            found = matches(ids, first + lane, count, start, limit)
            tokens = following(ids, first + lane, count, breakers)
            best = tl.maximum(best, tl.max(tl.where(tokens >= 0, found, 0)))
        allowed = tl.load(t + AT_ALLOWED).to(tl.int32)
        if best >= tl.maximum(allowed, 1):
            power = (best - allowed).to(tl.float64) * tl.log(tl.load(t + AT_BASE))
            price = tl.minimum(tl.load(t + AT_MULTIPLIER) * tl.exp(power), LARGEST)
            for first in range(start, count - 1, TILE):
                found = matches(ids, first + lane, count, start, best)
                tokens = following(ids, first + lane, count, breakers)
                mine = (found >= best) & (tokens >= low) & (tokens < high)
                tl.atomic_add(counts + tokens, 1, mask=mine, sem="relaxed")
            tl.debug_barrier()
            for first in range(start, count - 1, TILE):
                found = matches(ids, first + lane, count, start, best)
                tokens = following(ids, first + lane, count, breakers)
                mine = (found >= best) & (tokens >= low) & (tokens < high)
                many = tl.atomic_xchg(counts + tokens, 0, mask=mine, sem="relaxed")
                mine = mine & (many > 0)
                cost = tl.minimum(price * many, LARGEST).to(tl.float32)
                tl.store(y + tokens, tl.load(y + tokens, mask=mine, other=0.0) - cost, mask=mine)
            tl.debug_barrier()
