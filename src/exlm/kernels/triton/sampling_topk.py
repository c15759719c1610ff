"""Selects candidates of one row of logits without sorting it, in one program: top-k, and the thresholds.

The order is that of `exlm.sampling.candidates`: value descending, then column ascending. Floats become
integer keys of the same order. A four-way search finds the k-th largest key: each pass counts how many keys
reach three bounds, first among the maxima of blocks of columns, which `sampling_logits` stored, then within
the blocks that qualify. Rows without top-k need the smallest key that top-p, top-a, min-p and mirostat keep:
top-p finds it by the same search over sums of probability. Sums are float64 of float32 weights, in a fixed
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
NO_KEY = tl.constexpr(-(2**31))  # smaller than the key of every number
NEG_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf
MIN_FINITE_KEY = tl.constexpr(-2139095040)  # the key of the smallest finite number
POS_INF_KEY = tl.constexpr(2139095040)  # of inf; NaN lies above
LOW_31_BITS = tl.constexpr(0x7FFFFFFF)
MASK32 = tl.constexpr(0xFFFFFFFF)
KEEP_ALL_TIES = tl.constexpr(0x7FFFFFFF)  # number of ties to keep: all there are
# The first three bounds of a search for the k-th key, as distances from the largest logit.
FIRST_BOUND_FAR, FIRST_BOUND_NEAR, FIRST_BOUND_NEXT = (tl.constexpr(below) for below in (64.0, 16.0, 4.0))
BLOCKS_PER_TILE = tl.constexpr(64)  # blocks that are loaded together
SPARE_BLOCKS = tl.constexpr(8)  # more blocks than needed, so that the search ends early
SPLIT_BY_VALUE_ABOVE = tl.constexpr(1 << 20)  # bounds further apart are split by value, closer ones by key


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

    Loops load the next tile before they use this one (software pipelining): a program waits for a load where
    it first uses the values.
    """
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def masked_keys(v, columns, width):
    """The keys of some columns' values; NO_KEY beyond the row."""
    return tl.where(columns < width, key_of(v), NO_KEY)


@triton.jit
def load_keys(x, columns, width):
    """The keys of some columns of a row; NO_KEY beyond it."""
    return masked_keys(load_logits(x, columns, width), columns, width)


@triton.jit
def max_key(maxima, width, NUM_BLOCKS: tl.constexpr):
    """The largest of the maxima of all blocks."""
    blocks = tl.arange(0, NUM_BLOCKS)
    return tl.max(tl.load(maxima + blocks, mask=blocks * VOCAB_BLOCK < width, other=NO_KEY))


@triton.jit
def first_column_with(x, maxima, width, top_key, NUM_BLOCKS: tl.constexpr):
    """The first column with the largest key."""
    blocks = tl.arange(0, NUM_BLOCKS)
    keys = tl.load(maxima + blocks, mask=blocks * VOCAB_BLOCK < width, other=NO_KEY)
    block = tl.min(tl.where(keys == top_key, blocks, NUM_BLOCKS))
    columns = block * VOCAB_BLOCK + tl.arange(0, VOCAB_BLOCK)
    return tl.min(tl.where(load_keys(x, columns, width) == top_key, columns, width))


@triton.jit
def bound_step(lo, hi):
    """The distance of three equidistant bounds that cut (lo, hi] into four."""
    return (hi - lo + 3) // 4


@triton.jit
def narrow_kth_bounds(lo, hi, a, b, c, packed, reaching, k):
    """The bounds between which the k-th largest key lies, and how many keys reach the lower one.

    `reaching` keys reach lo; `packed` counts those that reach a, b and c.
    """
    count_a, count_b, count_c = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
    low = tl.where(count_c >= k, c, tl.where(count_b >= k, b, tl.where(count_a >= k, a, lo)))
    high = tl.where(count_c >= k, hi, tl.where(count_b >= k, c - 1, tl.where(count_a >= k, b - 1, a - 1)))
    num_reaching = tl.where(
        count_c >= k, count_c, tl.where(count_b >= k, count_b, tl.where(count_a >= k, count_a, reaching))
    )
    return low, high, num_reaching.to(tl.int32)


@triton.jit
def packed_counts(keys, a, b, c):
    """How many keys reach each of three bounds, packed into one int64 of 20-bit fields."""
    num_reaching = (keys >= a).to(tl.int64) + ((keys >= b).to(tl.int64) << 20) + ((keys >= c).to(tl.int64) << 40)
    return tl.sum(num_reaching)


@triton.jit
def select_blocks(maxima, block_ids, width, k, max_blocks, top_key, NUM_BLOCKS: tl.constexpr):
    """Store, ascending, the blocks whose maxima reach a bound; returns how many, and the bound.

    They are at least k and at most `max_blocks`, which takes far fewer passes than finding exactly k. If too
    many maxima equal the bound, exactly k are stored.
    """
    blocks = tl.arange(0, NUM_BLOCKS)
    keys = tl.load(maxima + blocks, mask=blocks * VOCAB_BLOCK < width, other=NO_KEY)
    reaching = (width + VOCAB_BLOCK - 1) // VOCAB_BLOCK
    lo, hi = tl.full([], NEG_INF_KEY, tl.int64), top_key.to(tl.int64)
    # The bound is hardly ever far below the top.
    a = key_of(value_of(top_key) - FIRST_BOUND_FAR).to(tl.int64)
    b = key_of(value_of(top_key) - FIRST_BOUND_NEAR).to(tl.int64)
    c = key_of(value_of(top_key) - FIRST_BOUND_NEXT).to(tl.int64)
    while (lo < hi) & (reaching > max_blocks):
        packed = packed_counts(keys, a, b, c)
        lo, hi, reaching = narrow_kth_bounds(lo, hi, a, b, c, packed, reaching, k)
        step = bound_step(lo, hi)
        a, b, c = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
    equal = keys == lo
    num_ties_kept = tl.where(reaching > max_blocks, k - tl.sum((keys > lo).to(tl.int32)), NUM_BLOCKS)
    take = (keys > lo) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_ties_kept))
    tl.store(block_ids + tl.cumsum(take.to(tl.int32), 0) - 1, blocks, mask=take)
    tl.debug_barrier()
    return tl.sum(take.to(tl.int32)), lo


@triton.jit
def load_block_keys(x, block_ids, count, width, start, TILE: tl.constexpr):
    """Keys and columns of a tile of the selected blocks, in the order of columns."""
    index = start + tl.arange(0, TILE)
    in_range = index < count * VOCAB_BLOCK
    columns = tl.load(block_ids + index // VOCAB_BLOCK, mask=in_range, other=0) * VOCAB_BLOCK + index % VOCAB_BLOCK
    columns = tl.where(in_range, columns, width)
    return load_keys(x, columns, width), columns


@triton.jit
def kth_key_in_blocks(x, block_ids, count, width, k, lo, top_key, TILE: tl.constexpr):
    """The k-th largest key in the selected blocks, at least `lo`, and how many of its ties are kept."""
    hi = top_key.to(tl.int64)
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
    """A key and its column in one int64, larger for a larger key, and for an earlier column of equal keys."""
    return (keys.to(tl.int64) << 32) | (columns ^ LOW_31_BITS).to(tl.int64)


@triton.jit
def top_k(
    x, maxima, block_ids, gathered, width, k, top_key,
    NUM_BLOCKS: tl.constexpr, SORT_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The k ≤ SORT_SIZE / 2 largest entries of a row, packed and sorted; others may follow."""
    max_blocks = tl.minimum(
        (k + SPARE_BLOCKS + BLOCKS_PER_TILE - 1) // BLOCKS_PER_TILE * BLOCKS_PER_TILE, SORT_SIZE - SORT_SIZE // 8
    )
    count, min_key = select_blocks(maxima, block_ids, width, k, max_blocks, top_key, NUM_BLOCKS)
    num_reaching = tl.full([], 0, tl.int32)
    for start in range(0, count * VOCAB_BLOCK, TILE):
        keys, _ = load_block_keys(x, block_ids, count, width, start, TILE)
        num_reaching += tl.sum((keys >= min_key).to(tl.int32))
    num_ties_kept = num_reaching
    if num_reaching > SORT_SIZE:
        min_key, num_ties_kept = kth_key_in_blocks(x, block_ids, count, width, k, min_key, top_key, TILE)
    count_gathered, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, count * VOCAB_BLOCK, TILE):
        keys, columns = load_block_keys(x, block_ids, count, width, start, TILE)
        equal = (keys == min_key).to(tl.int32)
        keep = (keys > min_key) | ((equal > 0) & (num_ties + tl.cumsum(equal, 0) <= num_ties_kept))
        tl.store(
            gathered + count_gathered + tl.cumsum(keep.to(tl.int32), 0) - 1, pack_key_column(keys, columns), mask=keep
        )
        count_gathered += tl.sum(keep.to(tl.int32))
        num_ties += tl.sum(equal)
    return sort_packed(gathered, count_gathered, SORT_SIZE)


@triton.jit
def sort_packed(gathered, count, SORT_SIZE: tl.constexpr):
    """Gathered entries, sorted descending; the smallest int64 beyond them."""
    tl.debug_barrier()
    indices = tl.arange(0, SORT_SIZE)
    packed = tl.load(gathered + indices, mask=indices < count, other=-(2**63))
    return tl.sort(packed, descending=True)


@triton.jit
def unnormalized_probs(keys, top_logit, inv_temperature, smoothing):
    """Unnormalised probabilities (weights), 1 for the largest logit."""
    below = value_of(keys) - top_logit
    smoothed = tl.where(smoothing > 0, -smoothing * below * below, below)
    return tl.where(keys > NEG_INF_KEY, tl.exp(smoothed * inv_temperature), 0.0)


@triton.jit
def min_key_for_ratio(top_logit, ratio, temperature, smoothing):
    """The smallest key whose weight is at least a ratio of the largest, which is 1."""
    distance = -tl.log(ratio) * temperature
    if smoothing > 0:
        distance = tl.sqrt(distance / smoothing)
    exact = top_logit.to(tl.float64) - distance
    near = exact.to(tl.float32)
    return key_of(near).to(tl.int64) + (near.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def tile_masses(keys, a, b, c, top_logit, inv_temperature, smoothing):
    """The mass (sum of weights) of a tile of keys, and of those that reach each of three bounds."""
    w = unnormalized_probs(keys, top_logit, inv_temperature, smoothing).to(tl.float64)
    lower = tl.join(w, tl.where(keys >= a, w, 0.0))
    upper = tl.join(tl.where(keys >= b, w, 0.0), tl.where(keys >= c, w, 0.0))
    lower, upper = tl.split(tl.sum(tl.join(lower, upper), 0))  # one reduction instead of four
    total, mass_a = tl.split(lower)
    mass_b, mass_c = tl.split(upper)
    return total, mass_a, mass_b, mass_c


@triton.jit
def row_masses(x, width, a, b, c, top_logit, inv_temperature, smoothing, TILE: tl.constexpr):
    """`tile_masses` of a row."""
    total = tl.full([], 0.0, tl.float64)
    mass_a, mass_b, mass_c = total, total, total
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        next_v = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        tile_total, tile_a, tile_b, tile_c = tile_masses(keys, a, b, c, top_logit, inv_temperature, smoothing)
        total += tile_total
        mass_a += tile_a
        mass_b += tile_b
        mass_c += tile_c
        v = next_v
    return total, mass_a, mass_b, mass_c


@triton.jit
def listed_masses(listed, count, a, b, c, top_logit, inv_temperature, smoothing, CANDIDATE_TILE: tl.constexpr):
    """`tile_masses` of listed keys, without the total."""
    mass_a = tl.full([], 0.0, tl.float64)
    mass_b, mass_c = mass_a, mass_a
    for start in range(0, count, CANDIDATE_TILE):
        indices = start + tl.arange(0, CANDIDATE_TILE)
        keys = tl.load(listed + indices, mask=indices < count, other=NO_KEY)
        _, tile_a, tile_b, tile_c = tile_masses(keys, a, b, c, top_logit, inv_temperature, smoothing)
        mass_a += tile_a
        mass_b += tile_b
        mass_c += tile_c
    return mass_a, mass_b, mass_c


@triton.jit
def list_keys_between(x, listed, width, lo, hi, TILE: tl.constexpr):
    """List a row's keys between two bounds; returns how many."""
    count = tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        next_v = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep = (keys >= lo) & (keys <= hi)
        num_new = tl.sum(keep.to(tl.int32))
        if num_new > 0:
            tl.store(listed + count + tl.cumsum(keep.to(tl.int32), 0) - 1, keys, mask=keep)
        count += num_new
        v = next_v
    tl.debug_barrier()
    return count


@triton.jit
def filter_listed_keys(listed, count, lo, hi, CANDIDATE_TILE: tl.constexpr):
    """Keep in a list only the keys between two bounds; returns how many."""
    num_kept = tl.full([], 0, tl.int32)
    for start in range(0, count, CANDIDATE_TILE):
        indices = start + tl.arange(0, CANDIDATE_TILE)
        keys = tl.load(listed + indices, mask=indices < count, other=NO_KEY)
        keep = (keys >= lo) & (keys <= hi)
        new_indices = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(listed + new_indices, keys, mask=keep)
        num_kept += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    return num_kept


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
def narrow_mass_bounds(lo, hi, above, a, b, c, mass_a, mass_b, mass_c, target_mass):
    """The bounds between which the target mass is reached, and the mass above them."""
    at_a, at_b, at_c = (above + mass_a >= target_mass, above + mass_b >= target_mass, above + mass_c >= target_mass)
    low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, lo)))
    high = tl.where(at_c, hi, tl.where(at_b, c - 1, tl.where(at_a, b - 1, a - 1)))
    passed = tl.where(at_c, 0.0, tl.where(at_b, mass_c, tl.where(at_a, mass_b, mass_a)))
    return low, high, above + passed


@triton.jit
def top_p_threshold(
    x, listed, width, top_p, top_key, top_logit, temperature, smoothing,
    TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr,
):  # fmt: skip
    """The smallest key that top-p keeps, and how many of its ties: KEEP_ALL_TIES for all of them."""
    inv_temperature, smooth = (1.0 / temperature).to(tl.float32), smoothing.to(tl.float32)
    hi = top_key.to(tl.int64)
    # Top-p keeps no token below this: all of those together have less mass than it excludes.
    min_possible_key = min_key_for_ratio(
        top_logit, (1.0 - top_p) / width.to(tl.float64), temperature * 1.00001, smoothing
    )
    lo = tl.minimum(tl.maximum(min_possible_key - 1, MIN_FINITE_KEY), hi)
    a, b, c = split_bounds(lo, hi)
    total, mass_a, mass_b, mass_c = row_masses(x, width, a, b, c, top_logit, inv_temperature, smooth, TILE)
    target_mass = tl.maximum(top_p - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE) * total
    lo, hi, above = narrow_mass_bounds(lo, hi, target_mass * 0.0, a, b, c, mass_a, mass_b, mass_c, target_mass)
    count = list_keys_between(x, listed, width, lo, hi, TILE)
    while (lo < hi) & (count > CANDIDATE_TILE):
        a, b, c = split_bounds(lo, hi)
        mass_a, mass_b, mass_c = listed_masses(
            listed, count, a, b, c, top_logit, inv_temperature, smooth, CANDIDATE_TILE
        )
        lo, hi, above = narrow_mass_bounds(lo, hi, above, a, b, c, mass_a, mass_b, mass_c, target_mass)
        count = filter_listed_keys(listed, count, lo, hi, CANDIDATE_TILE)
    indices = tl.arange(0, CANDIDATE_TILE)
    keys = tl.load(listed + indices, mask=indices < count, other=NO_KEY)
    while lo < hi:
        a, b, c = split_bounds(lo, hi)
        inside = tl.where((keys >= lo) & (keys <= hi), keys, NO_KEY)
        _, mass_a, mass_b, mass_c = tile_masses(inside, a, b, c, top_logit, inv_temperature, smooth)
        lo, hi, above = narrow_mass_bounds(lo, hi, above, a, b, c, mass_a, mass_b, mass_c, target_mass)
    if count <= CANDIDATE_TILE:
        count = tl.sum((keys == lo).to(tl.int32))
    weight = unnormalized_probs(lo.to(tl.int32), top_logit, inv_temperature, smooth).to(tl.float64)
    needed = tl.maximum(tl.ceil((target_mass - above) / tl.maximum(weight, 1e-300)), 1.0)
    return lo, tl.where(needed < count, needed, KEEP_ALL_TIES).to(tl.int32)


@triton.jit
def keep_mask(keys, min_key, num_ties_kept, ties):
    """Which keys of a tile are kept, and how many equal the smallest, after `ties` in the tiles before.

    The count is 0 if all ties are kept.
    """
    keep, num_new = keys >= min_key, tl.full([], 0, tl.int32)
    if num_ties_kept < KEEP_ALL_TIES:
        equal = (keys == min_key).to(tl.int32)
        num_new = tl.sum(equal)
        keep = (keys > min_key) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= num_ties_kept))
    return keep & (keys > NEG_INF_KEY), num_new


@triton.jit
def kept_mass(
    x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smoothing,
    TILE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The mass of all kept keys, and their number if COUNT; stores the mass and the ties before each tile."""
    total = tl.full([], 0.0, tl.float64)
    ties, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        next_v = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep, num_new = keep_mask(keys, min_key, num_ties_kept, ties)
        mass = tl.sum(
            tl.where(keep, unnormalized_probs(keys, top_logit, inv_temperature, smoothing), 0.0).to(tl.float64)
        )
        tl.store(tile_sums + start // TILE, mass)
        tl.store(tie_counts + start // TILE, ties)
        total += mass
        ties += num_new
        if COUNT:
            count += tl.sum(keep.to(tl.int32))
        v = next_v
    tl.debug_barrier()
    return total, count


@triton.jit
def inverse_cdf_full_vocab(
    x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smoothing, u,
    TILE: tl.constexpr,
):  # fmt: skip
    """The column at which the kept mass exceeds the fraction u, and its weight; called after `kept_mass`."""
    tiles = tl.arange(0, MAX_TILES)
    mass = tl.load(tile_sums + tiles, mask=tiles * TILE < width, other=0.0)
    ends = tl.cumsum(mass, 0)
    target_mass = u * BELOW_ONE * tl.max(ends)
    tile = tl.min(tl.where((ends > target_mass) & (mass > 0), tiles, MAX_TILES - 1))
    before = tl.sum(tl.where(tiles < tile, mass, 0.0))
    columns = tile * TILE + tl.arange(0, TILE)
    keys = load_keys(x, columns, width)
    keep, _ = keep_mask(keys, min_key, num_ties_kept, tl.load(tie_counts + tile))
    w = tl.where(keep, unnormalized_probs(keys, top_logit, inv_temperature, smoothing), 0.0)
    past = (before + tl.cumsum(w.to(tl.float64), 0) > target_mass) & (w > 0)
    column = tl.min(tl.where(past, columns, LOW_31_BITS))
    column = tl.minimum(column, tl.max(tl.where(w > 0, columns, 0)))
    return column, tl.sum(tl.where(columns == column, w, 0.0)).to(tl.float64)


@triton.jit
def gather_kept(x, gathered, width, min_key, num_ties_kept, SORT_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store the kept entries, packed, as far as they fit; returns how many there are."""
    count, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        next_v = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        keep, num_new = keep_mask(keys, min_key, num_ties_kept, ties)
        num_kept = tl.sum(keep.to(tl.int32))
        if num_kept > 0:
            indices = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(gathered + indices, pack_key_column(keys, start + columns), mask=keep & (indices < SORT_SIZE))
        count += num_kept
        ties += num_new
        v = next_v
    return count
