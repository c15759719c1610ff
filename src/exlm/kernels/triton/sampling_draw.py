"""Sampling kernels, second part: the token of one row of logits, edited or not; one program for each row.

The torch functions in `exlm.sampling` define the results. A row's settings choose one of three ways. With
top-k, the k largest logits are sorted and go through every step. Without it, a threshold is found below which
nothing can be drawn, and the token is drawn from the whole vocabulary by its cumulative sum. If steps follow
that depend on each candidate, the logits above the threshold are gathered and sorted first; if there are too
many to gather, the row's token is TOO_MANY_CANDIDATES.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import sampling_layout as layout
from .sampling_topk import (
    BELOW_ONE,
    KEEP_ALL_TIES,
    LOW_31_BITS,
    MASK32,
    MAX_TILES,
    NEG_INF_KEY,
    NO_KEY,
    POS_INF_KEY,
    THRESHOLD_TOLERANCE,
    first_column_with,
    gather_kept,
    inverse_cdf_full_vocab,
    kept_mass,
    load_logits,
    masked_keys,
    max_key,
    min_key_for_ratio,
    sort_packed,
    top_k,
    top_p_threshold,
    value_of,
)

NO_TOKEN_ALLOWED = tl.constexpr(layout.NO_TOKEN_ALLOWED)
NAN_LOGITS = tl.constexpr(layout.NAN_LOGITS)
INFINITE_LOGITS = tl.constexpr(layout.INFINITE_LOGITS)
TOO_MANY_CANDIDATES = tl.constexpr(layout.TOO_MANY_CANDIDATES)
GREEDY_BELOW_TEMPERATURE = tl.constexpr(layout.GREEDY_BELOW_TEMPERATURE)
TFS_MIN_PROB = tl.constexpr(layout.TFS_MIN_PROB)
INFINITY = tl.constexpr(float("inf"))
SMALL_SORT_SIZE = tl.constexpr(128)  # so many candidates are sorted quickly

MULTIPLIER_FIRST, MULTIPLIER_SECOND = (tl.constexpr(number) for number in layout.PHILOX_MULTIPLIERS)
KEY_FIRST, KEY_SECOND = (tl.constexpr(number) for number in layout.PHILOX_KEY_INCREMENTS)
ROUNDS = tl.constexpr(layout.PHILOX_ROUNDS)

HEADER_STRIDE, PARAM_STRIDE = tl.constexpr(layout.HEADER_WORDS), tl.constexpr(layout.PARAM_WIDTH)
AT_SEED, AT_MU, AT_INITIAL_MU, AT_XTC_EXEMPT = (
    tl.constexpr(layout.HEADER_OFFSETS[name]) for name in ("seed", "mu", "initial_mu", "xtc_exempt")
)
TOP_P, TOP_A, MIN_P, TFS, TYPICAL, MIROSTAT = (
    tl.constexpr(layout.STEP_FLAGS[name]) for name in ("top_p", "top_a", "min_p", "tfs", "typical", "mirostat")
)
DYNAMIC, FINAL_TEMPERATURE, XTC, SKEW, GREEDY = (
    tl.constexpr(layout.STEP_FLAGS[name])
    for name in ("dynamic_temperature", "final_temperature", "xtc", "skew", "greedy")
)
FLAGS_COLUMN, TOP_K_COLUMN, TEMPERATURE_COLUMN, SMOOTHING_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("flags", "top_k", "temperature", "smoothing_factor")
)
TOP_P_COLUMN, TOP_A_COLUMN, MIN_P_COLUMN, TFS_COLUMN, TYPICAL_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("top_p", "top_a", "min_p", "tfs", "typical")
)
TAU_COLUMN, ETA_COLUMN, MIROSTAT_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("mirostat_tau", "mirostat_eta", "mirostat")
)
MIN_TEMP_COLUMN, MAX_TEMP_COLUMN, TEMP_EXPONENT_COLUMN, FINAL_TEMPERATURE_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("min_temp", "max_temp", "temp_exponent", "final_temperature")
)
XTC_PROBABILITY_COLUMN, XTC_THRESHOLD_COLUMN, SKEW_POWER_COLUMN = (
    tl.constexpr(layout.PARAM_COLUMNS[name]) for name in ("xtc_probability", "xtc_threshold", "skew_power")
)


@triton.jit
def uniform(seed, position, rewind_count):
    """A float64 in [0, 1) for three int64, by Philox4x32-10.

    The products overflow, but their masked halves are exact.
    """
    a, b, c, d = position & MASK32, (position >> 32) & MASK32, rewind_count & MASK32, rewind_count & 0
    low, high = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIER_FIRST, c * MULTIPLIER_SECOND
        a, b = ((right >> 32) & MASK32) ^ b ^ low, right & MASK32
        c, d = ((left >> 32) & MASK32) ^ d ^ high, left & MASK32
        low, high = (low + KEY_FIRST) & MASK32, (high + KEY_SECOND) & MASK32
    return ((a << 21) | (b >> 11)).to(tl.float64) * 2.0**-53


@triton.jit
def keep_and_renormalize(p, mask):
    """Drop what is not in the mask, and renormalise."""
    kept = tl.where(mask, p, 0.0)
    return kept / tl.sum(kept)


@triton.jit
def top_p(p, limit):
    """The smallest set of most probable tokens that reaches the limit together."""
    return keep_and_renormalize(p, tl.cumsum(p, 0) - p < tl.maximum(limit - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE))


@triton.jit
def top_a(p, a):
    """Tokens with at least a times the square of the largest probability."""
    top = tl.max(p)
    return keep_and_renormalize(p, p >= tl.minimum(a * top * top * (1.0 - THRESHOLD_TOLERANCE), top))


@triton.jit
def min_p(p, fraction):
    """Tokens with at least a given part of the largest probability."""
    return keep_and_renormalize(p, p >= fraction * tl.max(p) * (1.0 - THRESHOLD_TOLERANCE))


@triton.jit
def tfs(p, z, N: tl.constexpr):
    """Tokens before the tail, where the curve of sorted probabilities has spent its curvature."""
    indices = tl.arange(0, N)
    q = tl.where(p >= TFS_MIN_PROB, p, 0.0)
    count = tl.sum((q > 0).to(tl.int32))
    has_curvature = indices < count - 2
    second = tl.gather(q, tl.minimum(indices + 1, N - 1), 0)
    third = tl.gather(q, tl.minimum(indices + 2, N - 1), 0)
    curvature = tl.where(has_curvature, tl.abs(q - 2.0 * second + third), 0.0)
    total = tl.sum(curvature)
    spent = has_curvature & (tl.cumsum(curvature, 0) <= (z + THRESHOLD_TOLERANCE) * total)
    tail_start = tl.where(total > TFS_MIN_PROB * THRESHOLD_TOLERANCE, tl.sum(spent.to(tl.int32)) + 1, count)
    return keep_and_renormalize(p, (q > 0) & (indices < tail_start))


@triton.jit
def typical(p, mass):
    """Locally typical sampling: the tokens whose surprisal is nearest to the entropy, up to the given mass.

    The largest distance that is kept is found by bisection on its bits.
    """
    limit = tl.maximum(mass - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE)
    surprisal = -tl.log(tl.where(p > 0, p, 1.0))
    entropy = tl.sum(p * surprisal)
    distance = tl.where(p > 0, tl.abs(surprisal - entropy), INFINITY).to(tl.int64, bitcast=True)
    lo = tl.full([], 0, tl.int64)
    hi = tl.max(tl.where(p > 0, distance, 0))
    while lo < hi:
        middle = lo + (hi - lo) // 2
        enough = tl.sum(tl.where(distance <= middle, p, 0.0)) >= limit
        lo = tl.where(enough, lo, middle + 1)
        hi = tl.where(enough, middle, hi)
    nearer = tl.sum(tl.where(distance < lo, p, 0.0))
    equal = tl.where(distance == lo, p, 0.0)
    return keep_and_renormalize(
        p, (distance < lo) | ((distance == lo) & (nearer + tl.cumsum(equal, 0) - equal < limit))
    )


@triton.jit
def mirostat(p, mu):
    """Mirostat 2: tokens whose surprisal in bits is at most the target."""
    return keep_and_renormalize(p, p >= tl.minimum(tl.exp2(-mu) * (1.0 - THRESHOLD_TOLERANCE), tl.max(p)))


@triton.jit
def apply_temperature(p, temperature, N: tl.constexpr):
    """Probabilities to the power of one over the temperature; near zero, only the first largest is kept."""
    indices = tl.arange(0, N)
    top = tl.max(p)
    is_top = indices == tl.min(tl.where(p == top, indices, N))
    power = tl.log(p / top) / tl.maximum(temperature, GREEDY_BELOW_TEMPERATURE)
    weights = tl.exp(tl.where(is_top, 0.0, tl.where(temperature >= GREEDY_BELOW_TEMPERATURE, power, float("-inf"))))
    return weights / tl.sum(weights)


@triton.jit
def dynamic_temperature(p, low, high, exponent, N: tl.constexpr):
    """Apply a temperature that rises with the entropy of the candidates."""
    entropy = -tl.sum(p * tl.log(tl.where(p > 0, p, 1.0)))
    count = tl.sum((p > 0).to(tl.int32))
    max_entropy = tl.where(count > 1, tl.log(count.to(tl.float64)), 1.0)
    relative_entropy = tl.minimum(tl.maximum(entropy / max_entropy, 0.0), 1.0)
    fraction = tl.where(
        relative_entropy > 0,
        tl.exp(exponent * tl.log(tl.where(relative_entropy > 0, relative_entropy, 1.0))),
        tl.where(exponent == 0.0, 1.0, 0.0),
    )
    return apply_temperature(p, low + (high - low) * fraction, N)


@triton.jit
def xtc(p, probability, threshold, exempt, N: tl.constexpr):
    """Scale down all but the least probable token above the threshold; exempt ones never count."""
    indices = tl.arange(0, N)
    above_threshold = (p >= threshold * (1.0 - THRESHOLD_TOLERANCE)) & (p > 0) & (exempt == 0)
    lowest_prob = tl.min(tl.where(above_threshold, p, INFINITY))
    kept_index = tl.max(tl.where(above_threshold & (p == lowest_prob), indices, -1))
    excluded = above_threshold & (indices != kept_index)
    mass = tl.sum(tl.where(excluded, p, 0.0))
    scale_up = 1.0 + probability * mass / tl.maximum(1.0 - mass, 1e-300)
    return p * tl.where(excluded, 1.0 - probability, scale_up)


@triton.jit
def unpack_column(packed):
    """The column of a packed entry."""
    return (packed & MASK32).to(tl.int32) ^ LOW_31_BITS


@triton.jit
def probs_of_packed(packed, count, params, N: tl.constexpr):
    """The probabilities and columns of the first `count` candidates."""
    keys = (packed >> 32).to(tl.int32)
    columns = unpack_column(packed)
    logits = tl.where(keys > NEG_INF_KEY, value_of(keys), float("-inf")).to(tl.float64)
    below = logits - tl.max(logits)
    smoothing = tl.load(params + SMOOTHING_COLUMN)
    smoothed = tl.where(smoothing > 0, -smoothing * below * below, below)
    w = tl.where(tl.arange(0, N) < count, tl.exp(smoothed / tl.load(params + TEMPERATURE_COLUMN)), 0.0)
    return w / tl.sum(w), columns


@triton.jit
def apply_threshold_steps(p, params, flags):
    """The first three truncations; rows without top-k have them in their threshold."""
    if flags & TOP_P:
        p = top_p(p, tl.load(params + TOP_P_COLUMN))
    if flags & TOP_A:
        p = top_a(p, tl.load(params + TOP_A_COLUMN))
    if flags & MIN_P:
        p = min_p(p, tl.load(params + MIN_P_COLUMN))
    return p


@triton.jit
def apply_other_steps(p, columns, params, flags, mu, xtc_exempt, N: tl.constexpr):
    """All steps after these."""
    if flags & TFS:
        p = tfs(p, tl.load(params + TFS_COLUMN), N)
    if flags & TYPICAL:
        p = typical(p, tl.load(params + TYPICAL_COLUMN))
    if flags & MIROSTAT:
        p = mirostat(p, mu)
    if flags & DYNAMIC:
        low, high = tl.load(params + MIN_TEMP_COLUMN), tl.load(params + MAX_TEMP_COLUMN)
        p = dynamic_temperature(p, low, high, tl.load(params + TEMP_EXPONENT_COLUMN), N)
    if flags & FINAL_TEMPERATURE:
        p = apply_temperature(p, tl.load(params + FINAL_TEMPERATURE_COLUMN), N)
    if flags & XTC:
        is_candidate = (p > 0) & (xtc_exempt != 0)
        exempt = tl.load(xtc_exempt.to(tl.pointer_type(tl.int8)) + columns, mask=is_candidate, other=0)
        p = xtc(p, tl.load(params + XTC_PROBABILITY_COLUMN), tl.load(params + XTC_THRESHOLD_COLUMN), exempt, N)
    return p


@triton.jit
def inverse_cdf(p, columns, u, N: tl.constexpr):
    """The candidate at which the cumulative sum exceeds the fraction u, and its probability."""
    indices = tl.arange(0, N)
    sums = tl.cumsum(p, 0)
    target_mass = u * BELOW_ONE * tl.max(sums)
    index = tl.min(tl.where((sums > target_mass) & (p > 0), indices, N))
    index = tl.minimum(index, tl.max(tl.where(p > 0, indices, 0)))
    is_drawn = indices == index
    return tl.sum(tl.where(is_drawn, columns, 0)), tl.sum(tl.where(is_drawn, p, 0.0))


@triton.jit
def min_kept_key(
    x, listed, tile_sums, tie_counts, width, params, flags, mu, top_key,
    TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr,
):  # fmt: skip
    """The smallest key that top-p, top-a, min-p and mirostat keep, and how many of its ties."""
    top_logit = value_of(top_key)
    temperature, smoothing = tl.load(params + TEMPERATURE_COLUMN), tl.load(params + SMOOTHING_COLUMN)
    inv_temperature, smooth = (1.0 / temperature).to(tl.float32), smoothing.to(tl.float32)
    min_key, num_ties_kept = tl.full([], NEG_INF_KEY, tl.int64), tl.full([], KEEP_ALL_TIES, tl.int32)
    if flags & TOP_P:
        min_key, num_ties_kept = top_p_threshold(
            x,
            listed,
            width,
            tl.load(params + TOP_P_COLUMN),
            top_key,
            top_logit,
            temperature,
            smoothing,
            TILE,
            CANDIDATE_TILE,
        )
    ratio = tl.full([], 0.0, tl.float64)
    if flags & TOP_A:
        total, _ = kept_mass(
            x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smooth, TILE, False
        )
        ratio = tl.minimum(tl.load(params + TOP_A_COLUMN) / total * (1.0 - THRESHOLD_TOLERANCE), 1.0)
    if flags & MIN_P:
        ratio = tl.maximum(ratio, tl.load(params + MIN_P_COLUMN) * (1.0 - THRESHOLD_TOLERANCE))
    if ratio > 0:
        bound = min_key_for_ratio(top_logit, ratio, temperature, smoothing)
        num_ties_kept = tl.where(bound > min_key, KEEP_ALL_TIES, num_ties_kept)
        min_key = tl.maximum(min_key, bound)
    if (flags & (MIROSTAT | TFS | TYPICAL)) == MIROSTAT:
        total, _ = kept_mass(
            x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smooth, TILE, False
        )
        ratio = tl.minimum(tl.exp2(-mu) * (1.0 - THRESHOLD_TOLERANCE) * total, 1.0)
        bound = min_key_for_ratio(top_logit, ratio, temperature, smoothing)
        num_ties_kept = tl.where(bound > min_key, KEEP_ALL_TIES, num_ties_kept)
        min_key = tl.maximum(min_key, bound)
    return min_key, num_ties_kept


@triton.jit
def draw_full_vocab(
    x, maxima, block_ids, gathered, tile_sums, tie_counts, width, params, min_key, num_ties_kept, top_key, u,
    candidate_probs, candidate_ids, num_top,
    NUM_BLOCKS: tl.constexpr, SORT_SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):  # fmt: skip
    """A token among all kept ones, and its probability; stores the top tokens if they are requested."""
    top_logit = value_of(top_key)
    temperature, smooth = (tl.load(params + TEMPERATURE_COLUMN), tl.load(params + SMOOTHING_COLUMN).to(tl.float32))
    inv_temperature = (1.0 / temperature).to(tl.float32)
    total, count = kept_mass(
        x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smooth, TILE, RETURN_TOP
    )
    token, w = inverse_cdf_full_vocab(
        x, tile_sums, tie_counts, width, min_key, num_ties_kept, top_logit, inv_temperature, smooth, u, TILE
    )
    if RETURN_TOP:
        packed = top_k(x, maxima, block_ids, gathered, width, num_top, top_key, NUM_BLOCKS, SORT_SIZE, CANDIDATE_TILE)
        probs, columns = probs_of_packed(packed, tl.minimum(num_top, count), params, SORT_SIZE)
        tl.store(candidate_probs + tl.arange(0, SORT_SIZE), probs / tl.max(probs) / total)
        tl.store(candidate_ids + tl.arange(0, SORT_SIZE), columns)
    return token, w / total


@triton.jit
def draw_from_candidates(
    x, maxima, block_ids, gathered, candidate_probs, candidate_ids, width, params, flags, min_key,
    num_ties_kept, top_key, u, mu, xtc_exempt,
    NUM_BLOCKS: tl.constexpr, SORT_SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr,
    FULL_VOCAB: tl.constexpr, ALL_STEPS: tl.constexpr, RETURN_TOP: tl.constexpr,
):  # fmt: skip
    """A token among at most SORT_SIZE candidates, which go through every step."""
    count = tl.load(params + TOP_K_COLUMN).to(tl.int32)
    if FULL_VOCAB:
        count = gather_kept(x, gathered, width, min_key, num_ties_kept, SORT_SIZE, TILE)
        if count <= SMALL_SORT_SIZE:
            token, prob = draw_from_gathered(
                gathered, count, candidate_probs, candidate_ids, params, flags, u, mu, xtc_exempt,
                SMALL_SORT_SIZE, RETURN_TOP,
            )  # fmt: skip
        else:
            token, prob = draw_from_gathered(
                gathered, tl.minimum(count, SORT_SIZE), candidate_probs, candidate_ids, params, flags, u, mu,
                xtc_exempt, SORT_SIZE, RETURN_TOP,
            )  # fmt: skip
        token = tl.where(count > SORT_SIZE, TOO_MANY_CANDIDATES, token)
    else:
        packed = top_k(x, maxima, block_ids, gathered, width, count, top_key, NUM_BLOCKS, SORT_SIZE, CANDIDATE_TILE)
        p, columns = probs_of_packed(packed, count, params, SORT_SIZE)
        p = apply_threshold_steps(p, params, flags)
        if ALL_STEPS:
            p = apply_other_steps(p, columns, params, flags, mu, xtc_exempt, SORT_SIZE)
        token, prob = inverse_cdf(p, columns, u, SORT_SIZE)
        if RETURN_TOP:
            tl.store(candidate_probs + tl.arange(0, SORT_SIZE), p)
            tl.store(candidate_ids + tl.arange(0, SORT_SIZE), columns)
    return token, prob


@triton.jit
def draw_from_gathered(
    gathered, count, candidate_probs, candidate_ids, params, flags, u, mu, xtc_exempt,
    N: tl.constexpr, RETURN_TOP: tl.constexpr,
):  # fmt: skip
    """A token among at most N gathered candidates, which passed the thresholds."""
    p, columns = probs_of_packed(sort_packed(gathered, count, N), count, params, N)
    p = apply_other_steps(p, columns, params, flags, mu, xtc_exempt, N)
    if RETURN_TOP:
        tl.store(candidate_probs + tl.arange(0, N), p)
        tl.store(candidate_ids + tl.arange(0, N), columns)
    if (flags & SKEW) == 0:
        p, columns = restore_column_order(gathered, count, p, columns, N)
    return inverse_cdf(p, columns, u, N)


@triton.jit
def restore_column_order(gathered, count, p, columns, N: tl.constexpr):
    """Probabilities and columns of at most N candidates in the order of columns, as they were gathered.

    Overwrites the gathered entries. Each candidate finds its index by binary search, because sorting is slow.
    """
    indices = tl.arange(0, N)
    in_range = indices < count
    ascending = unpack_column(tl.load(gathered + indices, mask=in_range, other=0))
    index, step = tl.zeros([N], tl.int32), count * 0 + N // 2
    while step > 0:
        probe = index + step
        probe_column = unpack_column(tl.load(gathered + probe, mask=probe < count, other=0))
        index = tl.where((probe < count) & (probe_column <= columns), probe, index)
        step = step // 2
    tl.debug_barrier()
    ordered = gathered.to(tl.pointer_type(tl.float64))
    tl.store(ordered + index, p, mask=in_range)
    tl.debug_barrier()
    return tl.load(ordered + indices, mask=in_range, other=0.0), ascending


@triton.jit
def draw_greedy(
    x, maxima, width, top_key, candidate_probs, candidate_ids,
    NUM_BLOCKS: tl.constexpr, SORT_SIZE: tl.constexpr, RETURN_TOP: tl.constexpr,
):  # fmt: skip
    """The first column with the largest key, with probability 1."""
    token = first_column_with(x, maxima, width, top_key, NUM_BLOCKS)
    if RETURN_TOP:
        indices = tl.arange(0, SORT_SIZE)
        tl.store(candidate_probs + indices, tl.where(indices == 0, 1.0, 0.0).to(tl.float64))
        tl.store(candidate_ids + indices, tl.zeros([SORT_SIZE], tl.int32) + token)
    return token


@triton.jit(do_not_specialize=["blocks_per_row", "scratch_words", "uses_copy", "num_top"])
def draw_kernel(
    x, tokens, probs, host_tokens, mus, candidate_probs, candidate_ids, table, words, stride, maxima,
    scratch, blocks_per_row, scratch_words, uses_copy, num_top, width,
    NUM_BLOCKS: tl.constexpr, SORT_SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr,
    FULL_VOCAB: tl.constexpr, ALL_STEPS: tl.constexpr, RETURN_TOP: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row: without top-k if FULL_VOCAB, with every step if ALL_STEPS.

    The token is also written to host memory.
    """
    row = tl.program_id(0).to(tl.int64)
    header, params = words + row * HEADER_STRIDE, table + row * PARAM_STRIDE
    batch_index = tl.load(header)
    x += tl.where(uses_copy != 0, row, batch_index) * stride
    u = uniform(tl.load(header + AT_SEED), tl.load(header + AT_SEED + 1), tl.load(header + AT_SEED + 2))
    mu_address, xtc_exempt = tl.load(header + AT_MU), tl.load(header + AT_XTC_EXEMPT)
    mu = tl.load(header + AT_INITIAL_MU).to(tl.float64, bitcast=True)
    if mu_address != 0:
        mu = tl.load(mu_address.to(tl.pointer_type(tl.float64)))
    maxima += row * blocks_per_row
    gathered = scratch + row * scratch_words
    tile_sums = (gathered + SORT_SIZE).to(tl.pointer_type(tl.float64))
    block_ids = (gathered + SORT_SIZE + MAX_TILES).to(tl.pointer_type(tl.int32))
    tie_counts = block_ids + SORT_SIZE
    candidate_probs, candidate_ids = candidate_probs + row * SORT_SIZE, candidate_ids + row * SORT_SIZE
    flags = tl.load(params + FLAGS_COLUMN).to(tl.int32)
    if flags & SKEW:
        u = tl.exp(tl.log(u) * tl.load(params + SKEW_POWER_COLUMN))
    top_key = max_key(maxima, width, NUM_BLOCKS)
    token, p = tl.full([], NO_TOKEN_ALLOWED, tl.int32), tl.full([], 1.0, tl.float64)
    if top_key >= POS_INF_KEY:
        token = tl.where(top_key == POS_INF_KEY, INFINITE_LOGITS, NAN_LOGITS)
    elif top_key > NEG_INF_KEY:
        min_key, num_ties_kept = tl.full([], NEG_INF_KEY, tl.int64), tl.full([], KEEP_ALL_TIES, tl.int32)
        if FULL_VOCAB:
            min_key, num_ties_kept = min_kept_key(
                x, tie_counts + MAX_TILES, tile_sums, tie_counts, width, params, flags, mu, top_key,
                TILE, CANDIDATE_TILE,
            )  # fmt: skip
        if flags & GREEDY:
            token = draw_greedy(
                x, maxima, width, top_key, candidate_probs, candidate_ids, NUM_BLOCKS, SORT_SIZE, RETURN_TOP
            )
        elif FULL_VOCAB and not ALL_STEPS:
            token, p = draw_full_vocab(
                x, maxima, block_ids, gathered, tile_sums, tie_counts, width, params, min_key, num_ties_kept,
                top_key, u, candidate_probs, candidate_ids, num_top,
                NUM_BLOCKS, SORT_SIZE, TILE, CANDIDATE_TILE, RETURN_TOP,
            )  # fmt: skip
        else:
            token, p = draw_from_candidates(
                x, maxima, block_ids, gathered, candidate_probs, candidate_ids, width, params, flags,
                min_key, num_ties_kept, top_key, u, mu, xtc_exempt,
                NUM_BLOCKS, SORT_SIZE, TILE, CANDIDATE_TILE, FULL_VOCAB, ALL_STEPS, RETURN_TOP,
            )  # fmt: skip
    tl.store(tokens + batch_index, token.to(tl.int64))
    tl.store(host_tokens + batch_index, token.to(tl.int64))
    tl.store(probs + batch_index, p.to(tl.float32))
    if tl.load(params + MIROSTAT_COLUMN) != 0:
        new_mu = mu + tl.load(params + ETA_COLUMN) * (tl.load(params + TAU_COLUMN) + tl.log2(p))
        tl.store(mus + row, new_mu)


@triton.jit
def greedy_kernel(x, tokens, probs, host_tokens, stride, width, TILE: tl.constexpr):
    """The token of the largest logit of one row, the first of equal ones; also written to host memory."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    best, best_columns = tl.full([TILE], NO_KEY, tl.int32), tl.zeros([TILE], tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        next_v = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        best_columns = tl.where(keys > best, start, best_columns)
        best = tl.maximum(best, keys)
        v = next_v
    best_columns += columns
    top_key = tl.max(best)
    token = tl.min(tl.where(best == top_key, best_columns, LOW_31_BITS))
    token = tl.where(top_key <= NEG_INF_KEY, NO_TOKEN_ALLOWED, tl.where(top_key == POS_INF_KEY, INFINITE_LOGITS, token))
    token = tl.where(top_key > POS_INF_KEY, NAN_LOGITS, token).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(host_tokens + row, token)
    tl.store(probs + row, 1.0)
