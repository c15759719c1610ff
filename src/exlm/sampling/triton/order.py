"""The largest entries of one row of logits, in the order of `order.py`, without sorting the row.

Floats become integer keys of the same order; the k-th largest is found by counting keys above a few bounds at
a time, first among the maxima of runs of columns, which `edit.py` stored, then within the runs that qualify.
One program works on one row, so nothing here depends on neighbours or on timing. It must be imported only
where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import lanes

RUN = tl.constexpr(lanes.RUN)
NOTHING = tl.constexpr(-(2**31))  # below the key of every number
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
HIGHEST = tl.constexpr(2139095040)  # of inf; NaN lies above
FLIP = tl.constexpr(0x7FFFFFFF)
LOW = tl.constexpr(0xFFFFFFFF)
FAR, NEAR, NEXT = (tl.constexpr(below) for below in (64.0, 16.0, 4.0))  # the first bounds, below the top
AT_ONCE = tl.constexpr(64)  # runs that are looked at together
SPARE = tl.constexpr(8)  # runs too many, for the search to end early


@triton.jit
def key_of(v):
    """Integers in the order of float32 values; both zeros are equal, NaN is largest."""
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(v == 0.0, 0, bits ^ ((bits >> 31) & FLIP))
    return tl.where(v != v, FLIP, key)


@triton.jit
def value_of(key):
    """The float32 value of a key."""
    return (key ^ ((key >> 31) & FLIP)).to(tl.float32, bitcast=True)


@triton.jit
def values_at(x, columns, width):
    """Some columns of a row.

    Loops ask for the next tile's before they use this one's: a load is waited for where it is first used.
    """
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def keys_in(v, columns, width):
    """The keys of some columns' values; NOTHING beyond the row."""
    return tl.where(columns < width, key_of(v), NOTHING)


@triton.jit
def keys_at(x, columns, width):
    """The keys of some columns of a row; NOTHING beyond it."""
    return keys_in(values_at(x, columns, width), columns, width)


@triton.jit
def highest(maxima, width, RUNS: tl.constexpr):
    """The largest of the maxima of all runs."""
    runs = tl.arange(0, RUNS)
    return tl.max(tl.load(maxima + runs, mask=runs * RUN < width, other=NOTHING))


@triton.jit
def first_of(x, maxima, width, top, RUNS: tl.constexpr):
    """The first column that has the largest key."""
    runs = tl.arange(0, RUNS)
    found = tl.load(maxima + runs, mask=runs * RUN < width, other=NOTHING)
    run = tl.min(tl.where(found == top, runs, RUNS))
    columns = run * RUN + tl.arange(0, RUN)
    return tl.min(tl.where(keys_at(x, columns, width) == top, columns, width))


@triton.jit
def split(lo, hi):
    """The first of three bounds that cut (lo, hi] into four; the others are as far apart again."""
    return (hi - lo + 3) // 4


@triton.jit
def narrowed(lo, hi, a, b, c, packed, reached, k):
    """The bounds between which the k-th largest key lies, and how many reach the lower one.

    It is known for lo (`reached`), and for a, b and c (`packed`).
    """
    of_a, of_b, of_c = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
    low = tl.where(of_c >= k, c, tl.where(of_b >= k, b, tl.where(of_a >= k, a, lo)))
    high = tl.where(of_c >= k, hi, tl.where(of_b >= k, c - 1, tl.where(of_a >= k, b - 1, a - 1)))
    many = tl.where(of_c >= k, of_c, tl.where(of_b >= k, of_b, tl.where(of_a >= k, of_a, reached)))
    return low, high, many.to(tl.int32)


@triton.jit
def reaching(keys, a, b, c):
    """How many keys reach each of three bounds, in one number."""
    many = (keys >= a).to(tl.int64) + ((keys >= b).to(tl.int64) << 20) + ((keys >= c).to(tl.int64) << 40)
    return tl.sum(many)


@triton.jit
def choose_runs(maxima, chosen, width, k, most, top, RUNS: tl.constexpr):
    """Store, ascending, the runs whose maxima reach a bound; how many, and the bound.

    They are at least k, and no more than `most`, which takes far fewer steps than to find exactly k; those
    are left only where so many maxima are equal.
    """
    runs = tl.arange(0, RUNS)
    keys = tl.load(maxima + runs, mask=runs * RUN < width, other=NOTHING)
    reached = (width + RUN - 1) // RUN
    lo, hi = tl.full([], LOWEST, tl.int64), top.to(tl.int64)
    # What is looked for is hardly ever far below the top.
    a = key_of(value_of(top) - FAR).to(tl.int64)
    b = key_of(value_of(top) - NEAR).to(tl.int64)
    c = key_of(value_of(top) - NEXT).to(tl.int64)
    while (lo < hi) & (reached > most):
        packed = reaching(keys, a, b, c)
        lo, hi, reached = narrowed(lo, hi, a, b, c, packed, reached, k)
        step = split(lo, hi)
        a, b, c = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
    equal = keys == lo
    spare = tl.where(reached > most, k - tl.sum((keys > lo).to(tl.int32)), RUNS)
    take = (keys > lo) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    tl.store(chosen + tl.cumsum(take.to(tl.int32), 0) - 1, runs, mask=take)
    tl.debug_barrier()
    return tl.sum(take.to(tl.int32)), lo


@triton.jit
def keys_of_runs(x, chosen, count, width, start, TILE: tl.constexpr):
    """Keys and columns of the chosen runs, a tile of them, in the order of columns."""
    place = start + tl.arange(0, TILE)
    inside = place < count * RUN
    columns = tl.load(chosen + place // RUN, mask=inside, other=0) * RUN + place % RUN
    columns = tl.where(inside, columns, width)
    return keys_at(x, columns, width), columns


@triton.jit
def kth_of_runs(x, chosen, count, width, k, lo, top, TILE: tl.constexpr):
    """The k-th largest key of the chosen runs, which is not below `lo`, and how many of its equals count."""
    hi = top.to(tl.int64)
    while lo < hi:
        step = split(lo, hi)
        a, b, c = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
        packed = tl.full([], 0, tl.int64)
        for start in range(0, count * RUN, TILE):
            keys, _ = keys_of_runs(x, chosen, count, width, start, TILE)
            packed += reaching(keys, a, b, c)
        lo, hi, _ = narrowed(lo, hi, a, b, c, packed, k, k)
    larger = tl.full([], 0, tl.int32)
    for start in range(0, count * RUN, TILE):
        keys, _ = keys_of_runs(x, chosen, count, width, start, TILE)
        larger += tl.sum((keys > lo).to(tl.int32))
    return lo, k - larger


@triton.jit
def pack(keys, columns):
    """A key and its column in one integer: the larger comes first, and of equal keys the first column."""
    return (keys.to(tl.int64) << 32) | (columns ^ FLIP).to(tl.int64)


@triton.jit
def largest(
    x, maxima, chosen, found, width, k, top, RUNS: tl.constexpr, SORT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The k ≤ SORT / 2 largest entries of a row, packed, in order; more follow if they were at hand."""
    most = tl.minimum((k + SPARE + AT_ONCE - 1) // AT_ONCE * AT_ONCE, SORT - SORT // 8)
    count, least = choose_runs(maxima, chosen, width, k, most, top, RUNS)
    many = tl.full([], 0, tl.int32)
    for start in range(0, count * RUN, TILE):
        keys, _ = keys_of_runs(x, chosen, count, width, start, TILE)
        many += tl.sum((keys >= least).to(tl.int32))
    spare = many
    if many > SORT:
        least, spare = kth_of_runs(x, chosen, count, width, k, least, top, TILE)
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, count * RUN, TILE):
        keys, columns = keys_of_runs(x, chosen, count, width, start, TILE)
        equal = (keys == least).to(tl.int32)
        keep = (keys > least) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= spare))
        tl.store(found + taken + tl.cumsum(keep.to(tl.int32), 0) - 1, pack(keys, columns), mask=keep)
        taken += tl.sum(keep.to(tl.int32))
        ties += tl.sum(equal)
    return in_order(found, taken, SORT)


@triton.jit
def in_order(found, count, SORT: tl.constexpr):
    """What was packed and stored, sorted; beyond it NOTHING."""
    tl.debug_barrier()
    places = tl.arange(0, SORT)
    packed = tl.load(found + places, mask=places < count, other=-(2**63))
    return tl.sort(packed, descending=True)
