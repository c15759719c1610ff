"""From one row of logits to its token, in one program; the kernel that a batch is picked with.

What is right is defined by `pipeline.py`. Three ways, as rows' plans say: the k largest logits, through every
step; all that reach a least logit, walked along where they are; or, if steps follow that look at each of
them, gathered first. If those are too many to gather, the token says so (TOO_MANY).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import rows
from ..lanes import AT, COLUMNS, FLAGS, HEAD, TABLE
from .mass import ALL, SHORT, TILES, gather, least_key, nucleus, stroll, weigh
from .order import (
    FLIP,
    HIGHEST,
    LOW,
    LOWEST,
    NOTHING,
    first_of,
    highest,
    in_order,
    keys_in,
    largest,
    value_of,
    values_at,
)  # fmt: skip
from .random import uniform
from .steps import SLACK, dynamic, min_p, mirostat, tempered, tfs, top_a, top_p, typical, xtc

NOTHING_ALLOWED = tl.constexpr(rows.NOTHING_ALLOWED)
NOT_A_NUMBER = tl.constexpr(rows.NOT_A_NUMBER)
INFINITE = tl.constexpr(rows.INFINITE)
TOO_MANY = tl.constexpr(rows.TOO_MANY)
HEAD_WORDS, TABLE_WORDS = tl.constexpr(HEAD), tl.constexpr(TABLE)
DRAW, TARGET, SPARED = (tl.constexpr(AT[name]) for name in ("draw", "target", "spared"))
FIRST_TARGET = tl.constexpr(AT["first"])
TOP_P, TOP_A, MIN_P = (tl.constexpr(FLAGS[name]) for name in ("top_p", "top_a", "min_p"))
TFS, TYPICAL, MIROSTAT = (tl.constexpr(FLAGS[name]) for name in ("tfs", "typical", "mirostat"))
GREEDY = tl.constexpr(FLAGS["greedy"])
DYNAMIC, LAST, XTC, SKEW = (tl.constexpr(FLAGS[name]) for name in ("dynamic", "last", "xtc", "skew"))
AT_FLAGS, AT_K = tl.constexpr(COLUMNS["flags"]), tl.constexpr(COLUMNS["top_k"])
AT_TEMPERATURE, AT_SMOOTHING = (tl.constexpr(COLUMNS[name]) for name in ("temperature", "smoothing"))
AT_TOP_P, AT_TOP_A, AT_MIN_P = (tl.constexpr(COLUMNS[name]) for name in ("top_p", "top_a", "min_p"))
AT_TFS, AT_TYPICAL, AT_LAST = (tl.constexpr(COLUMNS[name]) for name in ("tfs", "typical", "last"))
AT_TAU, AT_ETA, AT_MIROSTAT = (tl.constexpr(COLUMNS[name]) for name in ("tau", "eta", "mirostat"))
AT_MIN_TEMP, AT_MAX_TEMP, AT_EXPONENT = (
    tl.constexpr(COLUMNS[name]) for name in ("min_temp", "max_temp", "exponent")
)
AT_CHANCE, AT_THRESHOLD = (tl.constexpr(COLUMNS[name]) for name in ("xtc_probability", "xtc_threshold"))
AT_POWER = tl.constexpr(COLUMNS["skew_power"])
FEW = tl.constexpr(128)  # candidates that are sorted quickly


@triton.jit
def column_in(packed):
    """The column of what was packed."""
    return (packed & LOW).to(tl.int32) ^ FLIP


@triton.jit
def probabilities(packed, count, t, N: tl.constexpr):
    """The first candidates' probabilities and columns."""
    keys = (packed >> 32).to(tl.int32)
    columns = column_in(packed)
    v = tl.where(keys > LOWEST, value_of(keys), float("-inf")).to(tl.float64)
    below = v - tl.max(v)
    smoothing = tl.load(t + AT_SMOOTHING)
    bent = tl.where(smoothing > 0, -smoothing * below * below, below)
    w = tl.where(tl.arange(0, N) < count, tl.exp(bent / tl.load(t + AT_TEMPERATURE)), 0.0)
    return w / tl.sum(w), columns


@triton.jit
def cut(p, t, flags):
    """The first three truncations; in other ways than top-k they are done before."""
    if flags & TOP_P:
        p = top_p(p, tl.load(t + AT_TOP_P))
    if flags & TOP_A:
        p = top_a(p, tl.load(t + AT_TOP_A))
    if flags & MIN_P:
        p = min_p(p, tl.load(t + AT_MIN_P))
    return p


@triton.jit
def shaped(p, columns, t, flags, target, spared, N: tl.constexpr):
    """All other steps."""
    if flags & TFS:
        p = tfs(p, tl.load(t + AT_TFS), N)
    if flags & TYPICAL:
        p = typical(p, tl.load(t + AT_TYPICAL))
    if flags & MIROSTAT:
        p = mirostat(p, target)
    if flags & DYNAMIC:
        p = dynamic(
            p, tl.load(t + AT_MIN_TEMP), tl.load(t + AT_MAX_TEMP), tl.load(t + AT_EXPONENT), N
        )  # fmt: skip
    if flags & LAST:
        p = tempered(p, tl.load(t + AT_LAST), N)
    if flags & XTC:
        asked = (p > 0) & (spared != 0)
        out = tl.load(spared.to(tl.pointer_type(tl.int8)) + columns, mask=asked, other=0)
        p = xtc(p, tl.load(t + AT_CHANCE), tl.load(t + AT_THRESHOLD), out, N)
    return p


@triton.jit
def walk(p, columns, number, N: tl.constexpr):
    """The candidate at which the sum of probabilities exceeds the number's part, and its probability."""
    places = tl.arange(0, N)
    sums = tl.cumsum(p, 0)
    goal = number * SHORT * tl.max(sums)
    place = tl.min(tl.where((sums > goal) & (p > 0), places, N))
    place = tl.minimum(place, tl.max(tl.where(p > 0, places, 0)))
    here = places == place
    return tl.sum(tl.where(here, columns, 0)), tl.sum(tl.where(here, p, 0.0))


@triton.jit
def least_that_stays(
    x, listed, sums, ranks, width, t, flags, target, top_key, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The least key that passes top-p, top-a, min-p and mirostat, and how many of its equals do."""
    top = value_of(top_key)
    temperature, smoothing = tl.load(t + AT_TEMPERATURE), tl.load(t + AT_SMOOTHING)
    cooling, smooth = (1.0 / temperature).to(tl.float32), smoothing.to(tl.float32)
    least, spare = tl.full([], LOWEST, tl.int64), tl.full([], ALL, tl.int32)
    if flags & TOP_P:
        least, spare = nucleus(
            x, listed, width, tl.load(t + AT_TOP_P), top_key, top, temperature, smoothing, TILE, PART
        )  # fmt: skip
    ratio = tl.full([], 0.0, tl.float64)
    if flags & TOP_A:
        total, _ = weigh(x, sums, ranks, width, least, spare, top, cooling, smooth, TILE, False)
        ratio = tl.minimum(tl.load(t + AT_TOP_A) / total * (1.0 - SLACK), 1.0)
    if flags & MIN_P:
        ratio = tl.maximum(ratio, tl.load(t + AT_MIN_P) * (1.0 - SLACK))
    if ratio > 0:
        bound = least_key(top, ratio, temperature, smoothing)
        spare = tl.where(bound > least, ALL, spare)
        least = tl.maximum(least, bound)
    if (flags & (MIROSTAT | TFS | TYPICAL)) == MIROSTAT:
        total, _ = weigh(x, sums, ranks, width, least, spare, top, cooling, smooth, TILE, False)
        ratio = tl.minimum(tl.exp2(-target) * (1.0 - SLACK) * total, 1.0)
        bound = least_key(top, ratio, temperature, smoothing)
        spare = tl.where(bound > least, ALL, spare)
        least = tl.maximum(least, bound)
    return least, spare


@triton.jit
def walk_wide(
    x, maxima, chosen, found, sums, ranks, width, t, least, spare, top_key, number, all_p, all_ids, wanted,
    RUNS: tl.constexpr, SORT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """A token among all that stay, and its probability; the best ones are stored if they are wanted."""
    top = value_of(top_key)
    temperature, smooth = tl.load(t + AT_TEMPERATURE), tl.load(t + AT_SMOOTHING).to(tl.float32)
    cooling = (1.0 / temperature).to(tl.float32)
    total, count = weigh(x, sums, ranks, width, least, spare, top, cooling, smooth, TILE, WANTED)
    token, w = stroll(x, sums, ranks, width, least, spare, top, cooling, smooth, number, TILE)
    if WANTED:
        packed = largest(x, maxima, chosen, found, width, wanted, top_key, RUNS, SORT, PART)
        shares, columns = probabilities(packed, tl.minimum(wanted, count), t, SORT)
        tl.store(all_p + tl.arange(0, SORT), shares / tl.max(shares) / total)
        tl.store(all_ids + tl.arange(0, SORT), columns)
    return token, w / total


@triton.jit
def among_candidates(
    x, maxima, chosen, found, all_p, all_ids, width, t, flags, least, spare, top, number, target, spared,
    RUNS: tl.constexpr, SORT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr,
    SHAPED: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """A token among few candidates that go through every step."""
    count = tl.load(t + AT_K).to(tl.int32)
    if WIDE:
        count = gather(x, found, width, least, spare, SORT, TILE)
        if count <= FEW:
            token, share = among_gathered(
                found, count, all_p, all_ids, t, flags, number, target, spared, FEW, WANTED
            )  # fmt: skip
        else:
            token, share = among_gathered(
                found, tl.minimum(count, SORT), all_p, all_ids, t, flags, number, target, spared, SORT, WANTED
            )  # fmt: skip
        token = tl.where(count > SORT, TOO_MANY, token)
    else:
        packed = largest(x, maxima, chosen, found, width, count, top, RUNS, SORT, PART)
        p, columns = probabilities(packed, count, t, SORT)
        p = cut(p, t, flags)
        if SHAPED:
            p = shaped(p, columns, t, flags, target, spared, SORT)
        token, share = walk(p, columns, number, SORT)
        if WANTED:
            tl.store(all_p + tl.arange(0, SORT), p)
            tl.store(all_ids + tl.arange(0, SORT), columns)
    return token, share


@triton.jit
def among_gathered(
    found, count, all_p, all_ids, t, flags, number, target, spared, N: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """A token among at most N gathered candidates, which are past the cuts."""
    p, columns = probabilities(in_order(found, count, N), count, t, N)
    p = shaped(p, columns, t, flags, target, spared, N)
    if WANTED:
        tl.store(all_p + tl.arange(0, N), p)
        tl.store(all_ids + tl.arange(0, N), columns)
    if (flags & SKEW) == 0:
        p, columns = as_found(found, count, p, columns, N)
    return walk(p, columns, number, N)


@triton.jit
def as_found(found, count, p, columns, N: tl.constexpr):
    """Probabilities and columns of at most N candidates in the order in which they were found, of columns.

    What was found is written over. Each looks for its place by halving, because sorting takes long.
    """
    places = tl.arange(0, N)
    inside = places < count
    ascending = column_in(tl.load(found + places, mask=inside, other=0))
    place, step = tl.zeros([N], tl.int32), count * 0 + N // 2
    while step > 0:
        tried = place + step
        there = column_in(tl.load(found + tried, mask=tried < count, other=0))
        place = tl.where((tried < count) & (there <= columns), tried, place)
        step = step // 2
    tl.debug_barrier()
    ordered = found.to(tl.pointer_type(tl.float64))
    tl.store(ordered + place, p, mask=inside)
    tl.debug_barrier()
    return tl.load(ordered + places, mask=inside, other=0.0), ascending


@triton.jit
def the_largest(
    x, maxima, width, top, all_p, all_ids, RUNS: tl.constexpr, SORT: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """The first column with the largest key, as a certainty."""
    token = first_of(x, maxima, width, top, RUNS)
    if WANTED:
        places = tl.arange(0, SORT)
        tl.store(all_p + places, tl.where(places == 0, 1.0, 0.0).to(tl.float64))
        tl.store(all_ids + places, tl.zeros([SORT], tl.int32) + token)
    return token


@triton.jit(do_not_specialize=["held", "room", "edited", "wanted"])
def pick_kernel(
    x, tokens, shares, told, targets, all_p, all_ids, table, words, stride, maxima, scratch, held, room,
    edited, wanted, width, RUNS: tl.constexpr, SORT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    WIDE: tl.constexpr, SHAPED: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Pick the token of one row; rows without top-k are WIDE, those whose steps go beyond cutting SHAPED.

    The host is told the token, too.
    """
    row = tl.program_id(0).to(tl.int64)
    head, t = words + row * HEAD_WORDS, table + row * TABLE_WORDS
    place = tl.load(head)
    x += tl.where(edited != 0, row, place) * stride
    number = uniform(tl.load(head + DRAW), tl.load(head + DRAW + 1), tl.load(head + DRAW + 2))
    remembered, spared = tl.load(head + TARGET), tl.load(head + SPARED)
    target = tl.load(head + FIRST_TARGET).to(tl.float64, bitcast=True)
    if remembered != 0:
        target = tl.load(remembered.to(tl.pointer_type(tl.float64)))
    maxima += row * held
    found = scratch + row * room
    sums = (found + SORT).to(tl.pointer_type(tl.float64))
    chosen = (found + SORT + TILES).to(tl.pointer_type(tl.int32))
    ranks = chosen + SORT
    all_p, all_ids = all_p + row * SORT, all_ids + row * SORT
    flags = tl.load(t + AT_FLAGS).to(tl.int32)
    if flags & SKEW:
        number = tl.exp(tl.log(number) * tl.load(t + AT_POWER))
    top = highest(maxima, width, RUNS)
    token, p = tl.full([], NOTHING_ALLOWED, tl.int32), tl.full([], 1.0, tl.float64)
    if top >= HIGHEST:
        token = tl.where(top == HIGHEST, INFINITE, NOT_A_NUMBER)
    elif top > LOWEST:
        least, spare = tl.full([], LOWEST, tl.int64), tl.full([], ALL, tl.int32)
        if WIDE:
            least, spare = least_that_stays(
                x, ranks + TILES, sums, ranks, width, t, flags, target, top, TILE, PART
            )  # fmt: skip
        if flags & GREEDY:
            token = the_largest(x, maxima, width, top, all_p, all_ids, RUNS, SORT, WANTED)
        elif WIDE and not SHAPED:
            token, p = walk_wide(
                x, maxima, chosen, found, sums, ranks, width, t, least, spare, top, number, all_p, all_ids,
                wanted, RUNS, SORT, TILE, PART, WANTED,
            )  # fmt: skip
        else:
            token, p = among_candidates(
                x, maxima, chosen, found, all_p, all_ids, width, t, flags, least, spare, top, number, target,
                spared, RUNS, SORT, TILE, PART, WIDE, SHAPED, WANTED,
            )  # fmt: skip
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(told + place, token.to(tl.int64))
    tl.store(shares + place, p.to(tl.float32))
    if tl.load(t + AT_MIROSTAT) != 0:
        moved = target + tl.load(t + AT_ETA) * (tl.load(t + AT_TAU) + tl.log2(p))
        tl.store(targets + row, moved)


@triton.jit
def largest_kernel(x, tokens, shares, told, stride, width, TILE: tl.constexpr):
    """Take the largest logit of one row, the first of equal ones; the host is told, too."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    best, found = tl.full([TILE], NOTHING, tl.int32), tl.zeros([TILE], tl.int32)
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        keys = keys_in(v, start + columns, width)
        found = tl.where(keys > best, start, found)
        best = tl.maximum(best, keys)
        v = ahead
    found += columns
    top = tl.max(best)
    token = tl.min(tl.where(best == top, found, FLIP))
    token = tl.where(top <= LOWEST, NOTHING_ALLOWED, tl.where(top == HIGHEST, INFINITE, token))
    token = tl.where(top > HIGHEST, NOT_A_NUMBER, token).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(told + row, token)
    tl.store(shares + row, 1.0)
