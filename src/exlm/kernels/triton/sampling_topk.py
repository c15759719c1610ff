"""Selection without sorting, for one row of logits in one program: the k largest, and every threshold.

The order is that of `exlm.sampling.candidates`: value descending, then column ascending. Floats become
integer keys of the same order. The k-th largest key is found by counting how many keys reach a few bounds at
a time, first among the maxima of blocks of columns, which `sampling_logits` stored, then within the blocks
that qualify. Rows without top-k need the lowest key that top-p, top-a, min-p and mirostat keep: top-p finds
it by summing the probability above a few bounds at a time. Sums are float64 of float32 weights, in a fixed
order; a row's result depends neither on its neighbours nor on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import sampling_layout as layout

VOCAB_BLOCK = tl.constexpr(layout.VOCAB_BLOCK)
MAX_TILES = tl.constexpr(layout.MAX_TILES)
BELOW_ONE = tl.constexpr(layout.BELOW_ONE)
THRESHOLD_TOLERANCE = tl.constexpr(layout.THRESHOLD_TOLERANCE)
NO_KEY = tl.constexpr(-(2**31))  # below the key of every number
NEG_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf
MIN_FINITE_KEY = tl.constexpr(-2139095040)  # the key of the smallest finite number
POS_INF_KEY = tl.constexpr(2139095040)  # of inf; NaN lies above
LOW_31_BITS = tl.constexpr(0x7FFFFFFF)
MASK32 = tl.constexpr(0xFFFFFFFF)
KEEP_ALL_TIES = tl.constexpr(0x7FFFFFFF)  # as many equals as there are
FIRST_BOUND_FAR, FIRST_BOUND_NEAR, FIRST_BOUND_NEXT = (
    tl.constexpr(below) for below in (64.0, 16.0, 4.0)
)  # the first bounds, below the top
BLOCKS_PER_TILE = tl.constexpr(64)  # blocks that are looked at together
SPARE_BLOCKS = tl.constexpr(8)  # blocks too many, for the search to end early
SPLIT_BY_VALUE_ABOVE = tl.constexpr(1 << 20)  # bounds further apart are split by value, nearer ones by key


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


@triton.jit
def unnormalized_probs(keys, top, inv_temperature, smoothing):
    """Unnormalised probabilities, 1 for the top; `cooling` is one over the temperature."""
    below = value_of(keys) - top
    smoothed = tl.where(smoothing > 0, -smoothing * below * below, below)
    return tl.where(keys > NEG_INF_KEY, tl.exp(smoothed * inv_temperature), 0.0)


@triton.jit
def min_key_for_ratio(top, ratio, temperature, smoothing):
    """The least key whose weight is at least a ratio of the largest, which is 1."""
    distance = -tl.log(ratio) * temperature
    if smoothing > 0:
        distance = tl.sqrt(distance / smoothing)
    exact = top.to(tl.float64) - distance
    near = exact.to(tl.float32)
    return key_of(near).to(tl.int64) + (near.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def tile_masses(keys, a, b, c, top, inv_temperature, smoothing):
    """What a tile of keys weighs, and those that reach each of three bounds."""
    w = unnormalized_probs(keys, top, inv_temperature, smoothing).to(tl.float64)
    lower = tl.join(w, tl.where(keys >= a, w, 0.0))
    upper = tl.join(tl.where(keys >= b, w, 0.0), tl.where(keys >= c, w, 0.0))
    lower, upper = tl.split(tl.sum(tl.join(lower, upper), 0))  # one reduction instead of four
    everything, of_a = tl.split(lower)
    of_b, of_c = tl.split(upper)
    return everything, of_a, of_b, of_c


@triton.jit
def row_masses(x, width, a, b, c, top, inv_temperature, smoothing, TILE: tl.constexpr):
    """`masses_in` of a row."""
    everything = tl.full([], 0.0, tl.float64)
    of_a, of_b, of_c = everything, everything, everything
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        ahead = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        more, more_a, more_b, more_c = tile_masses(keys, a, b, c, top, inv_temperature, smoothing)
        everything += more
        of_a += more_a
        of_b += more_b
        of_c += more_c
        v = ahead
    return everything, of_a, of_b, of_c


@triton.jit
def listed_masses(listed, count, a, b, c, top, inv_temperature, smoothing, CANDIDATE_TILE: tl.constexpr):
    """`masses_in` of listed keys, but for what all weigh."""
    of_a = tl.full([], 0.0, tl.float64)
    of_b, of_c = of_a, of_a
    for start in range(0, count, CANDIDATE_TILE):
        places = start + tl.arange(0, CANDIDATE_TILE)
        keys = tl.load(listed + places, mask=places < count, other=NO_KEY)
        _, more_a, more_b, more_c = tile_masses(keys, a, b, c, top, inv_temperature, smoothing)
        of_a += more_a
        of_b += more_b
        of_c += more_c
    return of_a, of_b, of_c


@triton.jit
def list_keys_between(x, listed, width, lo, hi, TILE: tl.constexpr):
    """List a row's keys between two bounds; how many."""
    taken = tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        ahead = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep = (keys >= lo) & (keys <= hi)
        num_new = tl.sum(keep.to(tl.int32))
        if num_new > 0:
            tl.store(listed + taken + tl.cumsum(keep.to(tl.int32), 0) - 1, keys, mask=keep)
        taken += num_new
        v = ahead
    tl.debug_barrier()
    return taken


@triton.jit
def filter_listed_keys(listed, count, lo, hi, CANDIDATE_TILE: tl.constexpr):
    """Leave in a list only the keys between two bounds; how many."""
    taken = tl.full([], 0, tl.int32)
    for start in range(0, count, CANDIDATE_TILE):
        places = start + tl.arange(0, CANDIDATE_TILE)
        keys = tl.load(listed + places, mask=places < count, other=NO_KEY)
        keep = (keys >= lo) & (keys <= hi)
        after = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(listed + after, keys, mask=keep)
        taken += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    return taken


@triton.jit
def split_bounds(lo, hi):
    """Three keys that cut (lo, hi] into four."""
    step = (hi - lo + 3) // 4
    a, b, c = lo + step, lo + 2 * step, lo + 3 * step
    if hi - lo > SPLIT_BY_VALUE_ABOVE:
        low, high = value_of(lo.to(tl.int32)), value_of(hi.to(tl.int32))
        a = key_of(low * 0.75 + high * 0.25).to(tl.int64)
        b = key_of(low * 0.5 + high * 0.5).to(tl.int64)
        c = key_of(low * 0.25 + high * 0.75).to(tl.int64)
    a = tl.minimum(tl.maximum(a, lo + 1), hi)
    b = tl.minimum(tl.maximum(b, a), hi)
    return a, b, tl.minimum(tl.maximum(c, b), hi)


@triton.jit
def narrow_mass_bounds(lo, hi, above, a, b, c, of_a, of_b, of_c, target_mass):
    """Between which bounds the goal is reached, and what lies above them."""
    at_a, at_b, at_c = above + of_a >= target_mass, above + of_b >= target_mass, above + of_c >= target_mass
    low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, lo)))
    high = tl.where(at_c, hi, tl.where(at_b, c - 1, tl.where(at_a, b - 1, a - 1)))
    passed = tl.where(at_c, 0.0, tl.where(at_b, of_c, tl.where(at_a, of_b, of_a)))
    return low, high, above + passed


@triton.jit
def top_p_threshold(
    x,
    listed,
    width,
    limit,
    top_key,
    top,
    temperature,
    smoothing,
    TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
):
    """Top-p: the least key that stays, and how many of its equals do, ALL for all of them."""
    inv_temperature, smooth = (1.0 / temperature).to(tl.float32), smoothing.to(tl.float32)
    hi = top_key.to(tl.int64)
    # No token below this can stay: all that lies below it together is less than top-p leaves out.
    deepest = min_key_for_ratio(top, (1.0 - limit) / width.to(tl.float64), temperature * 1.00001, smoothing)
    lo = tl.minimum(tl.maximum(deepest - 1, MIN_FINITE_KEY), hi)
    a, b, c = split_bounds(lo, hi)
    total, of_a, of_b, of_c = row_masses(x, width, a, b, c, top, inv_temperature, smooth, TILE)
    target_mass = tl.maximum(limit - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE) * total
    lo, hi, above = narrow_mass_bounds(lo, hi, target_mass * 0.0, a, b, c, of_a, of_b, of_c, target_mass)
    count = list_keys_between(x, listed, width, lo, hi, TILE)
    while (lo < hi) & (count > CANDIDATE_TILE):
        a, b, c = split_bounds(lo, hi)
        of_a, of_b, of_c = listed_masses(listed, count, a, b, c, top, inv_temperature, smooth, CANDIDATE_TILE)
        lo, hi, above = narrow_mass_bounds(lo, hi, above, a, b, c, of_a, of_b, of_c, target_mass)
        count = filter_listed_keys(listed, count, lo, hi, CANDIDATE_TILE)
    places = tl.arange(0, CANDIDATE_TILE)
    keys = tl.load(listed + places, mask=places < count, other=NO_KEY)
    while lo < hi:
        a, b, c = split_bounds(lo, hi)
        inside = tl.where((keys >= lo) & (keys <= hi), keys, NO_KEY)
        _, of_a, of_b, of_c = tile_masses(inside, a, b, c, top, inv_temperature, smooth)
        lo, hi, above = narrow_mass_bounds(lo, hi, above, a, b, c, of_a, of_b, of_c, target_mass)
    if count <= CANDIDATE_TILE:
        count = tl.sum((keys == lo).to(tl.int32))
    each = unnormalized_probs(lo.to(tl.int32), top, inv_temperature, smooth).to(tl.float64)
    needed = tl.maximum(tl.ceil((target_mass - above) / tl.maximum(each, 1e-300)), 1.0)
    return lo, tl.where(needed < count, needed, KEEP_ALL_TIES).to(tl.int32)


@triton.jit
def keep_mask(keys, min_key, num_ties_kept, ties):
    """Which of a tile of keys stay, and how many equal the least, as `ties` did before; 0 if all may stay."""
    keep, num_new = keys >= min_key, tl.full([], 0, tl.int32)
    if num_ties_kept < KEEP_ALL_TIES:
        equal = (keys == min_key).to(tl.int32)
        num_new = tl.sum(equal)
        keep = (keys > min_key) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= num_ties_kept))
    return keep & (keys > NEG_INF_KEY), num_new


@triton.jit
def kept_mass(
    x,
    tile_sums,
    tie_counts,
    width,
    min_key,
    num_ties_kept,
    top,
    inv_temperature,
    smoothing,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """What all that stays weighs, and how many it is if COUNT; stored by tile, with the equals met before."""
    total = tl.full([], 0.0, tl.float64)
    ties, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        ahead = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep, num_new = keep_mask(keys, min_key, num_ties_kept, ties)
        mass = tl.sum(
            tl.where(keep, unnormalized_probs(keys, top, inv_temperature, smoothing), 0.0).to(tl.float64)
        )
        tl.store(tile_sums + start // TILE, mass)
        tl.store(tie_counts + start // TILE, ties)
        total += mass
        ties += num_new
        if COUNT:
            count += tl.sum(keep.to(tl.int32))
        v = ahead
    tl.debug_barrier()
    return total, count


@triton.jit
def inverse_cdf_full_vocab(
    x,
    tile_sums,
    tie_counts,
    width,
    min_key,
    num_ties_kept,
    top,
    inv_temperature,
    smoothing,
    u,
    TILE: tl.constexpr,
):
    """The column at which what stays adds up to the number's part, and its weight; after `weigh`."""
    tiles = tl.arange(0, MAX_TILES)
    each = tl.load(tile_sums + tiles, mask=tiles * TILE < width, other=0.0)
    ends = tl.cumsum(each, 0)
    target_mass = u * BELOW_ONE * tl.max(ends)
    tile = tl.min(tl.where((ends > target_mass) & (each > 0), tiles, MAX_TILES - 1))
    before = tl.sum(tl.where(tiles < tile, each, 0.0))
    columns = tile * TILE + tl.arange(0, TILE)
    keys = load_keys(x, columns, width)
    keep, _ = keep_mask(keys, min_key, num_ties_kept, tl.load(tie_counts + tile))
    w = tl.where(keep, unnormalized_probs(keys, top, inv_temperature, smoothing), 0.0)
    past = (before + tl.cumsum(w.to(tl.float64), 0) > target_mass) & (w > 0)
    column = tl.min(tl.where(past, columns, LOW_31_BITS))
    column = tl.minimum(column, tl.max(tl.where(w > 0, columns, 0)))
    return column, tl.sum(tl.where(columns == column, w, 0.0)).to(tl.float64)


@triton.jit
def gather_kept(x, gathered, width, min_key, num_ties_kept, SORT_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store what stays, packed; no more than fit. How many there are."""
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        ahead = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep, num_new = keep_mask(keys, min_key, num_ties_kept, ties)
        more = tl.sum(keep.to(tl.int32))
        if more > 0:
            places = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(
                gathered + places, pack_key_column(keys, start + columns), mask=keep & (places < SORT_SIZE)
            )
        taken += more
        ties += num_new
        v = ahead
    return taken
