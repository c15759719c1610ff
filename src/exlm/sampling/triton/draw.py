"""From one row of logits to its token, in one program; the kernel that a batch is picked with.

What is right is defined by `pipeline.py`. Three ways, as rows' plans say: the k largest logits, through every
step; all that reach a least logit, walked along where they are; or, if steps follow that look at each of
them, gathered first. If those are too many to gather, the token says so (TOO_MANY).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import request as rows
from ..kernel_params import HEADER_OFFSETS, HEADER_WORDS, STEP_FLAGS, TABLE_COLUMNS, TABLE_WIDTH
from .philox import uniform
from .steps import (
    THRESHOLD_TOLERANCE,
    apply_temperature,
    dynamic_temperature,
    min_p,
    mirostat,
    tfs,
    top_a,
    top_p,
    typical,
    xtc,
)
from .topk import (  # fmt: skip
    LOW_31_BITS,
    MASK32,
    NEG_INF_KEY,
    NO_KEY,
    POS_INF_KEY,
    first_column_with,
    load_logits,
    masked_keys,
    max_key,
    sort_packed,
    top_k,
    value_of,
)
from .topp import (
    BELOW_ONE,
    KEEP_ALL_TIES,
    MAX_TILES,
    gather_kept,
    inverse_cdf_full_vocab,
    kept_mass,
    min_key_for_ratio,
    top_p_threshold,
)

NO_TOKEN_ALLOWED = tl.constexpr(rows.NO_TOKEN_ALLOWED)
NAN_LOGITS = tl.constexpr(rows.NAN_LOGITS)
INFINITE_LOGITS = tl.constexpr(rows.INFINITE_LOGITS)
TOO_MANY_CANDIDATES = tl.constexpr(rows.TOO_MANY_CANDIDATES)
HEADER_STRIDE, TABLE_STRIDE = tl.constexpr(HEADER_WORDS), tl.constexpr(TABLE_WIDTH)
AT_SEED, AT_MU, AT_XTC_EXEMPT = (tl.constexpr(HEADER_OFFSETS[name]) for name in ("seed", "mu", "xtc_exempt"))
AT_INITIAL_MU = tl.constexpr(HEADER_OFFSETS["initial_mu"])
TOP_P, TOP_A, MIN_P = (tl.constexpr(STEP_FLAGS[name]) for name in ("top_p", "top_a", "min_p"))
TFS, TYPICAL, MIROSTAT = (tl.constexpr(STEP_FLAGS[name]) for name in ("tfs", "typical", "mirostat"))
GREEDY = tl.constexpr(STEP_FLAGS["greedy"])
DYNAMIC, FINAL_TEMPERATURE, XTC, SKEW = (
    tl.constexpr(STEP_FLAGS[name]) for name in ("dynamic_temperature", "final_temperature", "xtc", "skew")
)
FLAGS_COLUMN, TOP_K_COLUMN = tl.constexpr(TABLE_COLUMNS["flags"]), tl.constexpr(TABLE_COLUMNS["top_k"])
TEMPERATURE_COLUMN, SMOOTHING_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("temperature", "smoothing")
)
TOP_P_COLUMN, TOP_A_COLUMN, MIN_P_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("top_p", "top_a", "min_p")
)
TFS_COLUMN, TYPICAL_COLUMN, FINAL_TEMPERATURE_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("tfs", "typical", "final_temperature")
)
TAU_COLUMN, ETA_COLUMN, MIROSTAT_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("tau", "eta", "mirostat")
)
MIN_TEMP_COLUMN, MAX_TEMP_COLUMN, TEMP_EXPONENT_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("min_temp", "max_temp", "exponent")
)
XTC_PROBABILITY_COLUMN, XTC_THRESHOLD_COLUMN = (
    tl.constexpr(TABLE_COLUMNS[name]) for name in ("xtc_probability", "xtc_threshold")
)
SKEW_POWER_COLUMN = tl.constexpr(TABLE_COLUMNS["skew_power"])
SMALL_SORT_SIZE = tl.constexpr(128)  # candidates that are sorted quickly


@triton.jit
def unpack_column(packed):
    """The column of what was packed."""
    return (packed & MASK32).to(tl.int32) ^ LOW_31_BITS


@triton.jit
def probs_of_packed(packed, count, params, N: tl.constexpr):
    """The first candidates' probabilities and columns."""
    keys = (packed >> 32).to(tl.int32)
    columns = unpack_column(packed)
    v = tl.where(keys > NEG_INF_KEY, value_of(keys), float("-inf")).to(tl.float64)
    below = v - tl.max(v)
    smoothing = tl.load(params + SMOOTHING_COLUMN)
    smoothed = tl.where(smoothing > 0, -smoothing * below * below, below)
    w = tl.where(tl.arange(0, N) < count, tl.exp(smoothed / tl.load(params + TEMPERATURE_COLUMN)), 0.0)
    return w / tl.sum(w), columns


@triton.jit
def apply_threshold_steps(p, params, flags):
    """The first three truncations; in other ways than top-k they are done before."""
    if flags & TOP_P:
        p = top_p(p, tl.load(params + TOP_P_COLUMN))
    if flags & TOP_A:
        p = top_a(p, tl.load(params + TOP_A_COLUMN))
    if flags & MIN_P:
        p = min_p(p, tl.load(params + MIN_P_COLUMN))
    return p


@triton.jit
def apply_other_steps(p, columns, params, flags, mu, xtc_exempt, N: tl.constexpr):
    """All other steps."""
    if flags & TFS:
        p = tfs(p, tl.load(params + TFS_COLUMN), N)
    if flags & TYPICAL:
        p = typical(p, tl.load(params + TYPICAL_COLUMN))
    if flags & MIROSTAT:
        p = mirostat(p, mu)
    if flags & DYNAMIC:
        p = dynamic_temperature(
            p,
            tl.load(params + MIN_TEMP_COLUMN),
            tl.load(params + MAX_TEMP_COLUMN),
            tl.load(params + TEMP_EXPONENT_COLUMN),
            N,
        )
    if flags & FINAL_TEMPERATURE:
        p = apply_temperature(p, tl.load(params + FINAL_TEMPERATURE_COLUMN), N)
    if flags & XTC:
        is_candidate = (p > 0) & (xtc_exempt != 0)
        exempt = tl.load(xtc_exempt.to(tl.pointer_type(tl.int8)) + columns, mask=is_candidate, other=0)
        p = xtc(
            p, tl.load(params + XTC_PROBABILITY_COLUMN), tl.load(params + XTC_THRESHOLD_COLUMN), exempt, N
        )
    return p


@triton.jit
def inverse_cdf(p, columns, u, N: tl.constexpr):
    """The candidate at which the sum of probabilities exceeds the number's part, and its probability."""
    places = tl.arange(0, N)
    sums = tl.cumsum(p, 0)
    target_mass = u * BELOW_ONE * tl.max(sums)
    place = tl.min(tl.where((sums > target_mass) & (p > 0), places, N))
    place = tl.minimum(place, tl.max(tl.where(p > 0, places, 0)))
    is_drawn = places == place
    return tl.sum(tl.where(is_drawn, columns, 0)), tl.sum(tl.where(is_drawn, p, 0.0))


@triton.jit
def min_kept_key(
    x,
    listed,
    sums,
    tie_counts,
    width,
    params,
    flags,
    mu,
    top_key,
    TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
):
    """The least key that passes top-p, top-a, min-p and mirostat, and how many of its equals do."""
    top = value_of(top_key)
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
            top,
            temperature,
            smoothing,
            TILE,
            CANDIDATE_TILE,
        )
    ratio = tl.full([], 0.0, tl.float64)
    if flags & TOP_A:
        total, _ = kept_mass(
            x, sums, tie_counts, width, min_key, num_ties_kept, top, inv_temperature, smooth, TILE, False
        )
        ratio = tl.minimum(tl.load(params + TOP_A_COLUMN) / total * (1.0 - THRESHOLD_TOLERANCE), 1.0)
    if flags & MIN_P:
        ratio = tl.maximum(ratio, tl.load(params + MIN_P_COLUMN) * (1.0 - THRESHOLD_TOLERANCE))
    if ratio > 0:
        bound = min_key_for_ratio(top, ratio, temperature, smoothing)
        num_ties_kept = tl.where(bound > min_key, KEEP_ALL_TIES, num_ties_kept)
        min_key = tl.maximum(min_key, bound)
    if (flags & (MIROSTAT | TFS | TYPICAL)) == MIROSTAT:
        total, _ = kept_mass(
            x, sums, tie_counts, width, min_key, num_ties_kept, top, inv_temperature, smooth, TILE, False
        )
        ratio = tl.minimum(tl.exp2(-mu) * (1.0 - THRESHOLD_TOLERANCE) * total, 1.0)
        bound = min_key_for_ratio(top, ratio, temperature, smoothing)
        num_ties_kept = tl.where(bound > min_key, KEEP_ALL_TIES, num_ties_kept)
        min_key = tl.maximum(min_key, bound)
    return min_key, num_ties_kept


@triton.jit
def draw_full_vocab(
    x,
    maxima,
    block_ids,
    gathered,
    sums,
    tie_counts,
    width,
    params,
    min_key,
    num_ties_kept,
    top_key,
    u,
    candidate_probs,
    candidate_ids,
    num_top,
    NUM_BLOCKS: tl.constexpr,
    SORT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):
    """A token among all that stay, and its probability; the best ones are stored if they are wanted."""
    top = value_of(top_key)
    temperature, smooth = (
        tl.load(params + TEMPERATURE_COLUMN),
        tl.load(params + SMOOTHING_COLUMN).to(tl.float32),
    )
    inv_temperature = (1.0 / temperature).to(tl.float32)
    total, count = kept_mass(
        x, sums, tie_counts, width, min_key, num_ties_kept, top, inv_temperature, smooth, TILE, RETURN_TOP
    )
    token, w = inverse_cdf_full_vocab(
        x, sums, tie_counts, width, min_key, num_ties_kept, top, inv_temperature, smooth, u, TILE
    )
    if RETURN_TOP:
        packed = top_k(
            x, maxima, block_ids, gathered, width, num_top, top_key, NUM_BLOCKS, SORT_SIZE, CANDIDATE_TILE
        )
        probs, columns = probs_of_packed(packed, tl.minimum(num_top, count), params, SORT_SIZE)
        tl.store(candidate_probs + tl.arange(0, SORT_SIZE), probs / tl.max(probs) / total)
        tl.store(candidate_ids + tl.arange(0, SORT_SIZE), columns)
    return token, w / total


@triton.jit
def draw_from_candidates(
    x,
    maxima,
    block_ids,
    gathered,
    candidate_probs,
    candidate_ids,
    width,
    params,
    flags,
    min_key,
    num_ties_kept,
    top,
    u,
    mu,
    xtc_exempt,
    NUM_BLOCKS: tl.constexpr,
    SORT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
    FULL_VOCAB: tl.constexpr,
    ALL_STEPS: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):
    """A token among few candidates that go through every step."""
    count = tl.load(params + TOP_K_COLUMN).to(tl.int32)
    if FULL_VOCAB:
        count = gather_kept(x, gathered, width, min_key, num_ties_kept, SORT_SIZE, TILE)
        if count <= SMALL_SORT_SIZE:
            token, prob = draw_from_gathered(
                gathered,
                count,
                candidate_probs,
                candidate_ids,
                params,
                flags,
                u,
                mu,
                xtc_exempt,
                SMALL_SORT_SIZE,
                RETURN_TOP,
            )
        else:
            token, prob = draw_from_gathered(
                gathered,
                tl.minimum(count, SORT_SIZE),
                candidate_probs,
                candidate_ids,
                params,
                flags,
                u,
                mu,
                xtc_exempt,
                SORT_SIZE,
                RETURN_TOP,
            )
        token = tl.where(count > SORT_SIZE, TOO_MANY_CANDIDATES, token)
    else:
        packed = top_k(
            x, maxima, block_ids, gathered, width, count, top, NUM_BLOCKS, SORT_SIZE, CANDIDATE_TILE
        )
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
    gathered,
    count,
    candidate_probs,
    candidate_ids,
    params,
    flags,
    u,
    mu,
    xtc_exempt,
    N: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):
    """A token among at most N gathered candidates, which are past the cuts."""
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
    """Probabilities and columns of at most N candidates in the order in which they were found, of columns.

    What was found is written over. Each looks for its place by halving, because sorting takes long.
    """
    places = tl.arange(0, N)
    inside = places < count
    ascending = unpack_column(tl.load(gathered + places, mask=inside, other=0))
    place, step = tl.zeros([N], tl.int32), count * 0 + N // 2
    while step > 0:
        probe = place + step
        probe_column = unpack_column(tl.load(gathered + probe, mask=probe < count, other=0))
        place = tl.where((probe < count) & (probe_column <= columns), probe, place)
        step = step // 2
    tl.debug_barrier()
    ordered = gathered.to(tl.pointer_type(tl.float64))
    tl.store(ordered + place, p, mask=inside)
    tl.debug_barrier()
    return tl.load(ordered + places, mask=inside, other=0.0), ascending


@triton.jit
def draw_greedy(
    x,
    maxima,
    width,
    top,
    candidate_probs,
    candidate_ids,
    NUM_BLOCKS: tl.constexpr,
    SORT_SIZE: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):
    """The first column with the largest key, as a certainty."""
    token = first_column_with(x, maxima, width, top, NUM_BLOCKS)
    if RETURN_TOP:
        places = tl.arange(0, SORT_SIZE)
        tl.store(candidate_probs + places, tl.where(places == 0, 1.0, 0.0).to(tl.float64))
        tl.store(candidate_ids + places, tl.zeros([SORT_SIZE], tl.int32) + token)
    return token


@triton.jit(do_not_specialize=["blocks_per_row", "scratch_words", "uses_copy", "num_top"])
def draw_kernel(
    x,
    tokens,
    probs,
    host_tokens,
    mus,
    candidate_probs,
    candidate_ids,
    table,
    words,
    stride,
    maxima,
    scratch,
    blocks_per_row,
    scratch_words,
    uses_copy,
    num_top,
    width,
    NUM_BLOCKS: tl.constexpr,
    SORT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
    FULL_VOCAB: tl.constexpr,
    ALL_STEPS: tl.constexpr,
    RETURN_TOP: tl.constexpr,
):
    """Pick the token of one row; rows without top-k are WIDE, those whose steps go beyond cutting SHAPED.

    The host is told the token, too.
    """
    row = tl.program_id(0).to(tl.int64)
    header, params = words + row * HEADER_STRIDE, table + row * TABLE_STRIDE
    place = tl.load(header)
    x += tl.where(uses_copy != 0, row, place) * stride
    u = uniform(tl.load(header + AT_SEED), tl.load(header + AT_SEED + 1), tl.load(header + AT_SEED + 2))
    mu_address, xtc_exempt = tl.load(header + AT_MU), tl.load(header + AT_XTC_EXEMPT)
    mu = tl.load(header + AT_INITIAL_MU).to(tl.float64, bitcast=True)
    if mu_address != 0:
        mu = tl.load(mu_address.to(tl.pointer_type(tl.float64)))
    maxima += row * blocks_per_row
    gathered = scratch + row * scratch_words
    sums = (gathered + SORT_SIZE).to(tl.pointer_type(tl.float64))
    block_ids = (gathered + SORT_SIZE + MAX_TILES).to(tl.pointer_type(tl.int32))
    tie_counts = block_ids + SORT_SIZE
    candidate_probs, candidate_ids = candidate_probs + row * SORT_SIZE, candidate_ids + row * SORT_SIZE
    flags = tl.load(params + FLAGS_COLUMN).to(tl.int32)
    if flags & SKEW:
        u = tl.exp(tl.log(u) * tl.load(params + SKEW_POWER_COLUMN))
    top = max_key(maxima, width, NUM_BLOCKS)
    token, p = tl.full([], NO_TOKEN_ALLOWED, tl.int32), tl.full([], 1.0, tl.float64)
    if top >= POS_INF_KEY:
        token = tl.where(top == POS_INF_KEY, INFINITE_LOGITS, NAN_LOGITS)
    elif top > NEG_INF_KEY:
        min_key, num_ties_kept = tl.full([], NEG_INF_KEY, tl.int64), tl.full([], KEEP_ALL_TIES, tl.int32)
        if FULL_VOCAB:
            min_key, num_ties_kept = min_kept_key(
                x,
                tie_counts + MAX_TILES,
                sums,
                tie_counts,
                width,
                params,
                flags,
                mu,
                top,
                TILE,
                CANDIDATE_TILE,
            )
        if flags & GREEDY:
            token = draw_greedy(
                x, maxima, width, top, candidate_probs, candidate_ids, NUM_BLOCKS, SORT_SIZE, RETURN_TOP
            )
        elif FULL_VOCAB and not ALL_STEPS:
            token, p = draw_full_vocab(
                x,
                maxima,
                block_ids,
                gathered,
                sums,
                tie_counts,
                width,
                params,
                min_key,
                num_ties_kept,
                top,
                u,
                candidate_probs,
                candidate_ids,
                num_top,
                NUM_BLOCKS,
                SORT_SIZE,
                TILE,
                CANDIDATE_TILE,
                RETURN_TOP,
            )
        else:
            token, p = draw_from_candidates(
                x,
                maxima,
                block_ids,
                gathered,
                candidate_probs,
                candidate_ids,
                width,
                params,
                flags,
                min_key,
                num_ties_kept,
                top,
                u,
                mu,
                xtc_exempt,
                NUM_BLOCKS,
                SORT_SIZE,
                TILE,
                CANDIDATE_TILE,
                FULL_VOCAB,
                ALL_STEPS,
                RETURN_TOP,
            )
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(host_tokens + place, token.to(tl.int64))
    tl.store(probs + place, p.to(tl.float32))
    if tl.load(params + MIROSTAT_COLUMN) != 0:
        new_mu = mu + tl.load(params + ETA_COLUMN) * (tl.load(params + TAU_COLUMN) + tl.log2(p))
        tl.store(mus + row, new_mu)


@triton.jit
def greedy_kernel(x, tokens, probs, host_tokens, stride, width, TILE: tl.constexpr):
    """Take the largest logit of one row, the first of equal ones; the host is told, too."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    best, gathered = tl.full([TILE], NO_KEY, tl.int32), tl.zeros([TILE], tl.int32)
    columns = tl.arange(0, TILE)
    v = load_logits(x, columns, width)
    for start in range(0, width, TILE):
        ahead = load_logits(x, start + TILE + columns, width)
        keys = masked_keys(v, start + columns, width)
        gathered = tl.where(keys > best, start, gathered)
        best = tl.maximum(best, keys)
        v = ahead
    gathered += columns
    top = tl.max(best)
    token = tl.min(tl.where(best == top, gathered, LOW_31_BITS))
    token = tl.where(
        top <= NEG_INF_KEY, NO_TOKEN_ALLOWED, tl.where(top == POS_INF_KEY, INFINITE_LOGITS, token)
    )
    token = tl.where(top > POS_INF_KEY, NAN_LOGITS, token).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(host_tokens + row, token)
    tl.store(probs + row, 1.0)
