"""What happens to logits before they become probabilities, for one row in one program.

What is right is defined by `edits.py`. A row is copied and the copy changed; penalties are read from a list
of the text's tokens that stays on the device and is told only what changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import edits
from ..lanes import AT, COLUMNS, HEAD, TABLE
from .order import values_at

HEAD_WORDS, TABLE_WORDS = tl.constexpr(HEAD), tl.constexpr(TABLE)
LISTED, FADING, BLOCKS = (tl.constexpr(AT[name]) for name in ("listed", "fading", "blocked"))
DRY, BIAS, ALLOWED = (tl.constexpr(AT[name]) for name in ("dry", "bias", "allowed"))
AT_RATES = tl.constexpr(COLUMNS["repetition"])
BLOCKED = tl.constexpr(edits.BLOCKED)
LIST = tl.constexpr(1024)  # entries of a list that are worked on at a time


@triton.jit
def follow(words, listed, start, count):
    """Bring a list of (token, count) up to date: (slot, token, count) for what changed."""
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        change = words + start + i * 3
        slot = tl.load(change, mask=i < count, other=0)
        tl.store(listed + slot * 2, tl.load(change + 1, mask=i < count).to(tl.int32), mask=i < count)
        tl.store(listed + slot * 2 + 1, tl.load(change + 2, mask=i < count).to(tl.int32), mask=i < count)


@triton.jit
def penalise(x, y, width, tokens, inside, counts, strengths, rates):
    """Write some tokens' penalised logits."""
    inside = inside & (tokens >= 0) & (tokens < width)
    old = tl.load(x + tokens, mask=inside, other=0.0).to(tl.float32)
    repetition = tl.load(rates).to(tl.float32)
    frequency, presence = tl.load(rates + 1).to(tl.float32), tl.load(rates + 2).to(tl.float32)
    factor = 1.0 + (repetition - 1.0) * strengths
    factor = tl.where(strengths == 1.0, repetition, factor)
    new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
    tl.store(y + tokens, new - (frequency * counts + presence * strengths), mask=inside)


@triton.jit
def penalties(x, y, width, head, words, numbers, rates):
    """Penalise the tokens listed on the device, and those that came along because they fade."""
    listed, count = tl.load(head + LISTED).to(tl.pointer_type(tl.int32)), tl.load(head + LISTED + 1)
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(listed + i * 2, mask=i < count, other=-1)
        counts = tl.load(listed + i * 2 + 1, mask=i < count, other=0).to(tl.float32)
        penalise(x, y, width, tokens, i < count, counts, tl.full([LIST], 1.0, tl.float32), rates)
    start, count = tl.load(head + FADING), tl.load(head + FADING + 1)
    values = numbers + tl.load(head + FADING + 2)
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(words + start + i, mask=i < count, other=-1).to(tl.int32)
        counts = tl.load(values + i, mask=i < count, other=0.0).to(tl.float32)
        strengths = tl.load(values + count + i, mask=i < count, other=0.0).to(tl.float32)
        penalise(x, y, width, tokens, i < count, counts, strengths, rates)
    tl.debug_barrier()


@triton.jit
def block(y, words, start, count):
    """Leave some tokens for when there is nothing else."""
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(words + start + i, mask=i < count, other=0)
        tl.store(y + tokens, tl.full([LIST], BLOCKED, tl.float32), mask=i < count)
    tl.debug_barrier()


@triton.jit
def bias(y, address, width, TILE: tl.constexpr):
    """Add a number to every logit."""
    if address != 0:
        added = address.to(tl.pointer_type(tl.float32))
        for start in range(0, width, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < width
            v = tl.load(y + columns, mask=inside) + tl.load(added + columns, mask=inside)
            tl.store(y + columns, v, mask=inside)
        tl.debug_barrier()


@triton.jit
def discourage(y, words, costs, start, count):
    """Take from each of some tokens its own number: DRY."""
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        tokens = tl.load(words + start + i, mask=i < count, other=0)
        cost = tl.load(costs + i, mask=i < count, other=0.0).to(tl.float32)
        tl.store(y + tokens, tl.load(y + tokens, mask=i < count, other=0.0) - cost, mask=i < count)
    tl.debug_barrier()


@triton.jit
def restrict(y, words, start, width, TILE: tl.constexpr):
    """Exclude what a mask of bits does not allow."""
    if start != 0:
        for first in range(0, width, TILE):
            columns = first + tl.arange(0, TILE)
            inside = columns < width
            bits = tl.load(words + start + columns // 64, mask=inside, other=0) >> (columns % 64).to(tl.int64)
            tl.store(y + columns, tl.full([TILE], float("-inf"), tl.float32), mask=inside & ((bits & 1) == 0))


@triton.jit
def edit_kernel(x, stride, y, table, words, numbers, width, TILE: tl.constexpr):
    """Copy a row and change the copy, in the order in which the steps are defined."""
    row = tl.program_id(0).to(tl.int64)
    head = words + row * HEAD_WORDS
    x += tl.load(head) * stride
    y += row * width
    listed = tl.load(head + LISTED).to(tl.pointer_type(tl.int32))
    follow(words, listed, tl.load(head + LISTED + 3), tl.load(head + LISTED + 2))
    columns = tl.arange(0, TILE)
    v = values_at(x, columns, width)
    for start in range(0, width, TILE):
        ahead = values_at(x, start + TILE + columns, width)
        tl.store(y + start + columns, v, mask=start + columns < width)
        v = ahead
    tl.debug_barrier()
    penalties(x, y, width, head, words, numbers, table + row * TABLE_WORDS + AT_RATES)
    block(y, words, tl.load(head + BLOCKS), tl.load(head + BLOCKS + 1))
    bias(y, tl.load(head + BIAS), width, TILE)
    discourage(y, words, numbers + tl.load(head + DRY + 2), tl.load(head + DRY), tl.load(head + DRY + 1))
    restrict(y, words, tl.load(head + ALLOWED), width, TILE)
