"""What happens to logits before they become probabilities, for a span of one row in one program.

What is right is defined by `edits.py`. A row is copied and the copy changed; penalties are read from a list
of the text's tokens that stays on the device and is told only what changed. A program touches the logits and
the counts of its own columns alone, so none has to wait for another. Last it looks for the maximum of each
run of columns, from which `pick.py` goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import edits
from ..lanes import AT, COLUMNS, HEAD, TABLE
from .order import RUN, keys_in, values_at
from .repeat import discourage

HEAD_WORDS, TABLE_WORDS = tl.constexpr(HEAD), tl.constexpr(TABLE)
LISTED, FRESH, FADING, BLOCKS = (tl.constexpr(AT[name]) for name in ("listed", "fresh", "fading", "blocked"))
BIAS, ALLOWED = tl.constexpr(AT["bias"]), tl.constexpr(AT["allowed"])
AT_RATES = tl.constexpr(COLUMNS["repetition"])
BLOCKED = tl.constexpr(edits.BLOCKED)
LIST = tl.constexpr(1024)  # entries of a list that are worked on at a time


@triton.jit
def renew(words, listed, start, count):
    """Write a new list of (token, count). Every program of a row does, the same."""
    for first in range(0, 2 * count, LIST):
        i = first + tl.arange(0, LIST)
        tl.store(listed + i, tl.load(words + start + i, mask=i < 2 * count).to(tl.int32), mask=i < 2 * count)
    tl.debug_barrier()


@triton.jit
def recount(listed, size, token, change):
    """Change how often a token is listed; one that is not there gets the last entry."""
    missing = tl.full([], 1, tl.int32)
    for first in range(0, size, LIST):
        i = first + tl.arange(0, LIST)
        here = tl.load(listed + i * 2, mask=i < size, other=-1) == token
        counts = tl.load(listed + i * 2 + 1, mask=here, other=0)
        tl.store(listed + i * 2 + 1, counts + change, mask=here)
        missing -= tl.max(here.to(tl.int32))
    if missing > 0:
        tl.store(listed + size * 2 - 2, token.to(tl.int32))
        tl.store(listed + size * 2 - 1, change)
    tl.debug_barrier()


@triton.jit
def penalise(x, y, low, high, tokens, counts, strengths, rates):
    """Write the penalised logits of those tokens that are between two columns and occur."""
    inside = (tokens >= low) & (tokens < high) & (counts > 0)
    old = tl.load(x + tokens, mask=inside, other=0.0).to(tl.float32)
    repetition = tl.load(rates).to(tl.float32)
    frequency, presence = tl.load(rates + 1).to(tl.float32), tl.load(rates + 2).to(tl.float32)
    factor = 1.0 + (repetition - 1.0) * strengths
    factor = tl.where(strengths == 1.0, repetition, factor)
    new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
    tl.store(y + tokens, new - (frequency * counts + presence * strengths), mask=inside)


@triton.jit
def penalties(x, y, low, high, head, words, rates):
    """Penalise the tokens listed on the device, after what became of the list, and those that fade."""
    listed, size = tl.load(head + LISTED).to(tl.pointer_type(tl.int32)), tl.load(head + LISTED + 1)
    renew(words, listed, tl.load(head + FRESH), tl.load(head + FRESH + 1))
    joined, left = tl.load(head + LISTED + 2), tl.load(head + LISTED + 3)
    if (size > 0) & (joined >= low) & (joined < high):
        recount(listed, size, joined, 1)
    if (size > 0) & (left >= low) & (left < high):
        recount(listed, size, left, -1)
    for first in range(0, size, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(listed + i * 2, mask=i < size, other=-1)
        counts = tl.load(listed + i * 2 + 1, mask=i < size, other=0).to(tl.float32)
        penalise(x, y, low, high, tokens, counts, tl.full([LIST], 1.0, tl.float32), rates)
    fading, count = words + tl.load(head + FADING), tl.load(head + FADING + 1)
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(fading + i, mask=i < count, other=-1)
        counts, strengths = numbers(fading + count, i, count), numbers(fading + 2 * count, i, count)
        penalise(x, y, low, high, tokens, counts, strengths, rates)
    tl.debug_barrier()


@triton.jit
def numbers(words, i, count):
    """Words that are the bits of float64 numbers."""
    bits = tl.load(words + i, mask=i < count, other=0)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def block(y, low, high, tokens, count):
    """Leave some tokens for when there is nothing else."""
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        token = tl.load(tokens + i, mask=i < count, other=-1)
        tl.store(y + token, tl.full([LIST], BLOCKED, tl.float32), mask=(token >= low) & (token < high))
    tl.debug_barrier()


@triton.jit
def next_values(x, columns, width, end):
    """Some columns that are needed next, unless they lie beyond the end of a span."""
    return tl.load(x + columns, mask=(columns < width) & (columns < end), other=0.0).to(tl.float32)


@triton.jit
def copy(x, y, low, end, width, TILE: tl.constexpr):
    """Copy the logits of a span."""
    columns = tl.arange(0, TILE)
    v = next_values(x, low + columns, width, end)
    for start in range(low, end, TILE):
        ahead = next_values(x, start + TILE + columns, width, end)
        tl.store(y + start + columns, v, mask=start + columns < width)
        v = ahead
    tl.debug_barrier()


@triton.jit
def bias(y, low, end, width, address, TILE: tl.constexpr):
    """Add a number to every logit."""
    if address != 0:
        added = address.to(tl.pointer_type(tl.float32))
        for start in range(low, end, TILE):
            columns = start + tl.arange(0, TILE)
            v = values_at(y, columns, width) + values_at(added, columns, width)
            tl.store(y + columns, v, mask=columns < width)
        tl.debug_barrier()


@triton.jit
def restrict(y, low, end, width, words, at, TILE: tl.constexpr):
    """Exclude what a mask of bits does not allow."""
    if at != 0:
        for start in range(low, end, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < width
            bits = tl.load(words + at + columns // 64, mask=inside, other=0) >> (columns % 64).to(tl.int64)
            tl.store(y + columns, tl.full([TILE], float("-inf"), tl.float32), mask=inside & ((bits & 1) == 0))
        tl.debug_barrier()


@triton.jit
def survey(x, maxima, low, end, width, TILE: tl.constexpr):
    """Store the key of the maximum of every run of a span."""
    lane = tl.arange(0, TILE // RUN)
    columns = lane[:, None] * RUN + tl.arange(0, RUN)[None, :]
    v = next_values(x, low + columns, width, end)
    for start in range(low, end, TILE):
        ahead = next_values(x, start + TILE + columns, width, end)
        tl.store(maxima + start // RUN + lane, tl.max(keys_in(v, start + columns, width), 1))
        v = ahead


@triton.jit(do_not_specialize=["held", "span"])
def edit_kernel(
    x, table, words, stride, y, maxima, counts, held, span, width, TILE: tl.constexpr, EDITED: tl.constexpr,
    SEARCHED: tl.constexpr,
):  # fmt: skip
    """Change a span of tiles of a row, in a copy, if any row's logits are EDITED; then look for the maxima.

    The changes come in the order in which the steps are defined. Texts are SEARCHED if any row uses DRY.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * span
    low, end = first * TILE, tl.minimum(first + span, tl.cdiv(width, TILE)) * TILE
    high = tl.minimum(end, width)
    head = words + row * HEAD_WORDS
    x += tl.load(head) * stride
    maxima += row * held
    if EDITED:
        y += row * width
        t = table + row * TABLE_WORDS
        copy(x, y, low, end, width, TILE)
        penalties(x, y, low, high, head, words, t + AT_RATES)
        block(y, low, high, words + tl.load(head + BLOCKS), tl.load(head + BLOCKS + 1))
        bias(y, low, end, width, tl.load(head + BIAS), TILE)
        if SEARCHED:
            discourage(y, counts + row * width, low, high, width, head, t, LIST)
        restrict(y, low, end, width, words, tl.load(head + ALLOWED), TILE)
        survey(y, maxima, low, end, width, TILE)
    else:
        survey(x, maxima, low, end, width, TILE)
