"""Rows without top-k. Which logit is the least that stays, and a walk along all that do.

The steps that only cut (top-p, top-a, min-p, mirostat) come down to a least key, found without sorting: top-p
by weighing what lies above a few bounds at a time and going on with what lies between two of them. The walk
is in the order of ids. Sums are float64 of float32 weights, and in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lanes, pick
from .order import FLIP, LOWEST, NOTHING, key_of, keys_at, keys_in, pack, value_of, values_at
from .steps import SLACK

SHORT = tl.constexpr(pick.SHORT)
WIDE = tl.constexpr(1 << 20)  # bounds further apart are split by value, nearer ones by key
FINITE = tl.constexpr(-2139095040)  # the key of the smallest finite number
TILES = tl.constexpr(lanes.TILES)
ALL = tl.constexpr(0x7FFFFFFF)  # as many equals as there are


@triton.jit
def weights(keys, top, cooling, smoothing):
    """Unnormalised probabilities, 1 for the top; `cooling` is one over the temperature."""
    below = value_of(keys) - top
    bent = tl.where(smoothing > 0, -smoothing * below * below, below)
    return tl.where(keys > LOWEST, tl.exp(bent * cooling), 0.0)


@triton.jit
def least_key(top, ratio, temperature, smoothing):
    """The least key whose weight is at least a ratio of the largest, which is 1."""
    deep = -tl.log(ratio) * temperature
    if smoothing > 0:
        deep = tl.sqrt(deep / smoothing)
    exact = top.to(tl.float64) - deep
    near = exact.to(tl.float32)
    return key_of(near).to(tl.int64) + (near.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def masses_in(keys, a, b, c, top, cooling, smoothing):
    """What a tile of keys weighs, and those that reach each of three bounds."""
    w = weights(keys, top, cooling, smoothing).to(tl.float64)
    lower = tl.join(w, tl.where(keys >= a, w, 0.0))
    upper = tl.join(tl.where(keys >= b, w, 0.0), tl.where(keys >= c, w, 0.0))
    lower, upper = tl.split(tl.sum(tl.join(lower, upper), 0))  # one reduction instead of four
    everything, of_a = tl.split(lower)
    of_b, of_c = tl.split(upper)
    return everything, of_a, of_b, of_c


@triton.jit
def masses(x, width, a, b, c, top, cooling, smoothing, TILE: tl.constexpr):
    """`masses_in` of a row."""
    everything = tl.full([], 0.0, tl.float64)
    of_a, of_b, of_c = everything, everything, everything
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        keys = keys_in(v, start + columns, width)
        more, more_a, more_b, more_c = masses_in(keys, a, b, c, top, cooling, smoothing)
        everything += more
        of_a += more_a
        of_b += more_b
        of_c += more_c
        v = ahead
    return everything, of_a, of_b, of_c


@triton.jit
def masses_listed(listed, count, a, b, c, top, cooling, smoothing, PART: tl.constexpr):
    """`masses_in` of listed keys, but for what all weigh."""
    of_a = tl.full([], 0.0, tl.float64)
    of_b, of_c = of_a, of_a
    for start in range(0, count, PART):
        places = start + tl.arange(0, PART)
        keys = tl.load(listed + places, mask=places < count, other=NOTHING)
        _, more_a, more_b, more_c = masses_in(keys, a, b, c, top, cooling, smoothing)
        of_a += more_a
        of_b += more_b
        of_c += more_c
    return of_a, of_b, of_c


@triton.jit
def list_between(x, listed, width, lo, hi, TILE: tl.constexpr):
    """List a row's keys between two bounds; how many."""
    taken = tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        keys = keys_in(v, start + columns, width)
        keep = (keys >= lo) & (keys <= hi)
        many = tl.sum(keep.to(tl.int32))
        if many > 0:
            tl.store(listed + taken + tl.cumsum(keep.to(tl.int32), 0) - 1, keys, mask=keep)
        taken += many
        v = ahead
    tl.debug_barrier()
    return taken


@triton.jit
def relist_between(listed, count, lo, hi, PART: tl.constexpr):
    """Leave in a list only the keys between two bounds; how many."""
    taken = tl.full([], 0, tl.int32)
    for start in range(0, count, PART):
        places = start + tl.arange(0, PART)
        keys = tl.load(listed + places, mask=places < count, other=NOTHING)
        keep = (keys >= lo) & (keys <= hi)
        after = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(listed + after, keys, mask=keep)
        taken += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    return taken


@triton.jit
def bounds(lo, hi):
    """Three keys that cut (lo, hi] into four."""
    step = (hi - lo + 3) // 4
    a, b, c = lo + step, lo + 2 * step, lo + 3 * step
    if hi - lo > WIDE:
        low, high = value_of(lo.to(tl.int32)), value_of(hi.to(tl.int32))
        a = key_of(low * 0.75 + high * 0.25).to(tl.int64)
        b = key_of(low * 0.5 + high * 0.5).to(tl.int64)
        c = key_of(low * 0.25 + high * 0.75).to(tl.int64)
    a = tl.minimum(tl.maximum(a, lo + 1), hi)
    b = tl.minimum(tl.maximum(b, a), hi)
    return a, b, tl.minimum(tl.maximum(c, b), hi)


@triton.jit
def between(lo, hi, above, a, b, c, of_a, of_b, of_c, goal):
    """Between which bounds the goal is reached, and what lies above them."""
    at_a, at_b, at_c = above + of_a >= goal, above + of_b >= goal, above + of_c >= goal
    low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, lo)))
    high = tl.where(at_c, hi, tl.where(at_b, c - 1, tl.where(at_a, b - 1, a - 1)))
    passed = tl.where(at_c, 0.0, tl.where(at_b, of_c, tl.where(at_a, of_b, of_a)))
    return low, high, above + passed


@triton.jit
def nucleus(
    x, listed, width, limit, top_key, top, temperature, smoothing, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Top-p: the least key that stays, and how many of its equals do, ALL for all of them."""
    cooling, smooth = (1.0 / temperature).to(tl.float32), smoothing.to(tl.float32)
    hi = top_key.to(tl.int64)
    # No token below this can stay: all that lies below it together is less than top-p leaves out.
    deepest = least_key(top, (1.0 - limit) / width.to(tl.float64), temperature * 1.00001, smoothing)
    lo = tl.minimum(tl.maximum(deepest - 1, FINITE), hi)
    a, b, c = bounds(lo, hi)
    total, of_a, of_b, of_c = masses(x, width, a, b, c, top, cooling, smooth, TILE)
    goal = tl.maximum(limit - SLACK, SLACK) * total
    lo, hi, above = between(lo, hi, goal * 0.0, a, b, c, of_a, of_b, of_c, goal)
    count = list_between(x, listed, width, lo, hi, TILE)
    while (lo < hi) & (count > PART):
        a, b, c = bounds(lo, hi)
        of_a, of_b, of_c = masses_listed(listed, count, a, b, c, top, cooling, smooth, PART)
        lo, hi, above = between(lo, hi, above, a, b, c, of_a, of_b, of_c, goal)
        count = relist_between(listed, count, lo, hi, PART)
    places = tl.arange(0, PART)
    keys = tl.load(listed + places, mask=places < count, other=NOTHING)
    while lo < hi:
        a, b, c = bounds(lo, hi)
        inside = tl.where((keys >= lo) & (keys <= hi), keys, NOTHING)
        _, of_a, of_b, of_c = masses_in(inside, a, b, c, top, cooling, smooth)
        lo, hi, above = between(lo, hi, above, a, b, c, of_a, of_b, of_c, goal)
    if count <= PART:
        count = tl.sum((keys == lo).to(tl.int32))
    each = weights(lo.to(tl.int32), top, cooling, smooth).to(tl.float64)
    needed = tl.maximum(tl.ceil((goal - above) / tl.maximum(each, 1e-300)), 1.0)
    return lo, tl.where(needed < count, needed, ALL).to(tl.int32)


@triton.jit
def staying(keys, least, spare, ties):
    """Which of a tile of keys stay, and how many equal the least, as `ties` did before; 0 if all may stay."""
    keep, many = keys >= least, tl.full([], 0, tl.int32)
    if spare < ALL:
        equal = (keys == least).to(tl.int32)
        many = tl.sum(equal)
        keep = (keys > least) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= spare))
    return keep & (keys > LOWEST), many


@triton.jit
def weigh(
    x, sums, ranks, width, least, spare, top, cooling, smoothing, TILE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """What all that stays weighs, and how many it is if COUNT; stored by tile, with the equals met before."""
    total = tl.full([], 0.0, tl.float64)
    ties, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        keys = keys_in(v, start + columns, width)
        keep, many = staying(keys, least, spare, ties)
        mass = tl.sum(tl.where(keep, weights(keys, top, cooling, smoothing), 0.0).to(tl.float64))
        tl.store(sums + start // TILE, mass)
        tl.store(ranks + start // TILE, ties)
        total += mass
        ties += many
        if COUNT:
            count += tl.sum(keep.to(tl.int32))
        v = ahead
    tl.debug_barrier()
    return total, count


@triton.jit
def stroll(x, sums, ranks, width, least, spare, top, cooling, smoothing, number, TILE: tl.constexpr):
    """The column at which what stays adds up to the number's part, and its weight; after `weigh`."""
    tiles = tl.arange(0, TILES)
    each = tl.load(sums + tiles, mask=tiles * TILE < width, other=0.0)
    ends = tl.cumsum(each, 0)
    goal = number * SHORT * tl.max(ends)
    tile = tl.min(tl.where((ends > goal) & (each > 0), tiles, TILES - 1))
    before = tl.sum(tl.where(tiles < tile, each, 0.0))
    columns = tile * TILE + tl.arange(0, TILE)
    keys = keys_at(x, columns, width)
    keep, _ = staying(keys, least, spare, tl.load(ranks + tile))
    w = tl.where(keep, weights(keys, top, cooling, smoothing), 0.0)
    past = (before + tl.cumsum(w.to(tl.float64), 0) > goal) & (w > 0)
    column = tl.min(tl.where(past, columns, FLIP))
    column = tl.minimum(column, tl.max(tl.where(w > 0, columns, 0)))
    return column, tl.sum(tl.where(columns == column, w, 0.0)).to(tl.float64)


@triton.jit
def gather(x, found, width, least, spare, SORT: tl.constexpr, TILE: tl.constexpr):
    """Store what stays, packed; no more than fit. How many there are."""
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        keys = keys_in(v, start + columns, width)
        keep, many = staying(keys, least, spare, ties)
        more = tl.sum(keep.to(tl.int32))
        if more > 0:
            places = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(found + places, pack(keys, start + columns), mask=keep & (places < SORT))
        taken += more
        ties += many
        v = ahead
    return taken
