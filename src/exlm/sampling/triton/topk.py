"""The largest entries of one row of logits, in the order of `order.py`, without sorting the row.

Floats become integer keys of the same order; the k-th largest is found by counting keys above a few bounds at
a time, first among the maxima of runs of columns, which `edit.py` stored, then within the runs that qualify.
One program works on one row, so nothing here depends on neighbours or on timing. It must be imported only
where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import kernel_params as lanes

VOCAB_BLOCK = tl.constexpr(lanes.VOCAB_BLOCK)
NO_KEY = tl.constexpr(-(2**31))  # below the key of every number
NEG_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf
POS_INF_KEY = tl.constexpr(2139095040)  # of inf; NaN lies above
LOW_31_BITS = tl.constexpr(0x7FFFFFFF)
MASK32 = tl.constexpr(0xFFFFFFFF)
FIRST_BOUND_FAR, FIRST_BOUND_NEAR, FIRST_BOUND_NEXT = (
    tl.constexpr(below) for below in (64.0, 16.0, 4.0)
)  # the first bounds, below the top
BLOCKS_PER_TILE = tl.constexpr(64)  # runs that are looked at together
SPARE_BLOCKS = tl.constexpr(8)  # runs too many, for the search to end early


@triton.jit
def key_of(v):
    """Integers in the order of float32 values; both zeros are equal, NaN is largest."""
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(v == 0.0, 0, bits ^ ((bits >> 31) & LOW_31_BITS))
    return tl.where(v != v, LOW_31_BITS, key)


@triton.jit
def value_of(key):
    """The float32 value of a key."""
    return (key ^ ((key >> 31) & LOW_31_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(x, columns, width):
    """Some columns of a row.

    Loops ask for the next tile's before they use this one's: a load is waited for where it is first used.
    """
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def masked_keys(v, columns, width):
    """The keys of some columns' values; NOTHING beyond the row."""
    return tl.where(columns < width, key_of(v), NO_KEY)


@triton.jit
def load_keys(x, columns, width):
    """The keys of some columns of a row; NOTHING beyond it."""
    return masked_keys(load_logits(x, columns, width), columns, width)


@triton.jit
def max_key(maxima, width, NUM_BLOCKS: tl.constexpr):
    """The largest of the maxima of all runs."""
    runs = tl.arange(0, NUM_BLOCKS)
    return tl.max(tl.load(maxima + runs, mask=runs * VOCAB_BLOCK < width, other=NO_KEY))


@triton.jit
def first_column_with(x, maxima, width, top, NUM_BLOCKS: tl.constexpr):
    """The first column that has the largest key."""
    runs = tl.arange(0, NUM_BLOCKS)
    found = tl.load(maxima + runs, mask=runs * VOCAB_BLOCK < width, other=NO_KEY)
    run = tl.min(tl.where(found == top, runs, NUM_BLOCKS))
    columns = run * VOCAB_BLOCK + tl.arange(0, VOCAB_BLOCK)
    return tl.min(tl.where(load_keys(x, columns, width) == top, columns, width))


@triton.jit
def bound_step(lo, hi):
    """The first of three bounds that cut (lo, hi] into four; the others are as far apart again."""
    return (hi - lo + 3) // 4


@triton.jit
def narrow_kth_bounds(lo, hi, a, b, c, packed, reached, k):
    """The bounds between which the k-th largest key lies, and how many reach the lower one.

    It is known for lo (`reached`), and for a, b and c (`packed`).
    """
    of_a, of_b, of_c = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
    low = tl.where(of_c >= k, c, tl.where(of_b >= k, b, tl.where(of_a >= k, a, lo)))
    high = tl.where(of_c >= k, hi, tl.where(of_b >= k, c - 1, tl.where(of_a >= k, b - 1, a - 1)))
    num_reaching = tl.where(of_c >= k, of_c, tl.where(of_b >= k, of_b, tl.where(of_a >= k, of_a, reached)))
    return low, high, num_reaching.to(tl.int32)


@triton.jit
def packed_counts(keys, a, b, c):
    """How many keys reach each of three bounds, in one number."""
    num_reaching = (
        (keys >= a).to(tl.int64) + ((keys >= b).to(tl.int64) << 20) + ((keys >= c).to(tl.int64) << 40)
    )
    return tl.sum(num_reaching)


@triton.jit
def select_blocks(maxima, block_ids, width, k, most, top, NUM_BLOCKS: tl.constexpr):
    """Store, ascending, the runs whose maxima reach a bound; how many, and the bound.

    They are at least k, and no more than `most`, which takes far fewer steps than to find exactly k; those
    are left only where so many maxima are equal.
    """
    runs = tl.arange(0, NUM_BLOCKS)
    keys = tl.load(maxima + runs, mask=runs * VOCAB_BLOCK < width, other=NO_KEY)
    reached = (width + VOCAB_BLOCK - 1) // VOCAB_BLOCK
    lo, hi = tl.full([], NEG_INF_KEY, tl.int64), top.to(tl.int64)
    # What is looked for is hardly ever far below the top.
    a = key_of(value_of(top) - FIRST_BOUND_FAR).to(tl.int64)
    b = key_of(value_of(top) - FIRST_BOUND_NEAR).to(tl.int64)
    c = key_of(value_of(top) - FIRST_BOUND_NEXT).to(tl.int64)
    while (lo < hi) & (reached > most):
        packed = packed_counts(keys, a, b, c)
        lo, hi, reached = narrow_kth_bounds(lo, hi, a, b, c, packed, reached, k)
        step = bound_step(lo, hi)
        a, b, c = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
    equal = keys == lo
    num_ties_kept = tl.where(reached > most, k - tl.sum((keys > lo).to(tl.int32)), NUM_BLOCKS)
    take = (keys > lo) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_ties_kept))
    tl.store(block_ids + tl.cumsum(take.to(tl.int32), 0) - 1, runs, mask=take)
    tl.debug_barrier()
    return tl.sum(take.to(tl.int32)), lo


@triton.jit
def load_block_keys(x, block_ids, count, width, start, TILE: tl.constexpr):
    """Keys and columns of the chosen runs, a tile of them, in the order of columns."""
    place = start + tl.arange(0, TILE)
    inside = place < count * VOCAB_BLOCK
    columns = (
        tl.load(block_ids + place // VOCAB_BLOCK, mask=inside, other=0) * VOCAB_BLOCK + place % VOCAB_BLOCK
    )
    columns = tl.where(inside, columns, width)
    return load_keys(x, columns, width), columns


@triton.jit
def kth_key_in_blocks(x, block_ids, count, width, k, lo, top, TILE: tl.constexpr):
    """The k-th largest key of the chosen runs, which is not below `lo`, and how many of its equals count."""
    hi = top.to(tl.int64)
    while lo < hi:
        step = bound_step(lo, hi)
        a, b, c = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
        packed = tl.full([], 0, tl.int64)
        for start in range(0, count * VOCAB_BLOCK, TILE):
            keys, _ = load_block_keys(x, block_ids, count, width, start, TILE)
            packed += packed_counts(keys, a, b, c)
        lo, hi, _ = narrow_kth_bounds(lo, hi, a, b, c, packed, k, k)
    larger = tl.full([], 0, tl.int32)
    for start in range(0, count * VOCAB_BLOCK, TILE):
        keys, _ = load_block_keys(x, block_ids, count, width, start, TILE)
        larger += tl.sum((keys > lo).to(tl.int32))
    return lo, k - larger


@triton.jit
def pack_key_column(keys, columns):
    """A key and its column in one integer: the larger comes first, and of equal keys the first column."""
    return (keys.to(tl.int64) << 32) | (columns ^ LOW_31_BITS).to(tl.int64)


@triton.jit
def top_k(
    x,
    maxima,
    block_ids,
    found,
    width,
    k,
    top,
    NUM_BLOCKS: tl.constexpr,
    SORT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The k ≤ SORT / 2 largest entries of a row, packed, in order; more follow if they were at hand."""
    most = tl.minimum(
        (k + SPARE_BLOCKS + BLOCKS_PER_TILE - 1) // BLOCKS_PER_TILE * BLOCKS_PER_TILE,
        SORT_SIZE - SORT_SIZE // 8,
    )
    count, min_key = select_blocks(maxima, block_ids, width, k, most, top, NUM_BLOCKS)
    num_reaching = tl.full([], 0, tl.int32)
    for start in range(0, count * VOCAB_BLOCK, TILE):
        keys, _ = load_block_keys(x, block_ids, count, width, start, TILE)
        num_reaching += tl.sum((keys >= min_key).to(tl.int32))
    num_ties_kept = num_reaching
    if num_reaching > SORT_SIZE:
        min_key, num_ties_kept = kth_key_in_blocks(x, block_ids, count, width, k, min_key, top, TILE)
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, count * VOCAB_BLOCK, TILE):
        keys, columns = load_block_keys(x, block_ids, count, width, start, TILE)
        equal = (keys == min_key).to(tl.int32)
        keep = (keys > min_key) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= num_ties_kept))
        tl.store(
            found + taken + tl.cumsum(keep.to(tl.int32), 0) - 1, pack_key_column(keys, columns), mask=keep
        )
        taken += tl.sum(keep.to(tl.int32))
        ties += tl.sum(equal)
    return sort_packed(found, taken, SORT_SIZE)


@triton.jit
def sort_packed(found, count, SORT_SIZE: tl.constexpr):
    """What was packed and stored, sorted; beyond it NOTHING."""
    tl.debug_barrier()
    places = tl.arange(0, SORT_SIZE)
    packed = tl.load(found + places, mask=places < count, other=-(2**63))
    return tl.sort(packed, descending=True)
