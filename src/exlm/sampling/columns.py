"""Columns: what is written into the heads of a party's rows for each token, one class for each feature.

Each knows the rows it is about and writes their words; lists that a word refers to are appended to `more`,
whose first word stands at `Heads.size`. Nothing here chooses a token or launches anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dry import DryRule
from .lanes import AT
from .listed import TokenList
from .penalties import PenaltyRule
from .rows import Row
from .state import SamplerState

TARGET, FADING, DRY, ALLOWED = AT["target"], AT["fading"], AT["dry"], AT["allowed"]
LISTED, FRESH = AT["listed"], AT["fresh"]
SIZE, JOINED, LEFT = LISTED + 1, LISTED + 2, LISTED + 3
TARGET_BYTES = 8


class Heads(NamedTuple):
    """The heads of some rows (rows, HEAD), and how many words are sent before `more`."""

    words: NDArray[np.int64]
    size: int


class Listed(NamedTuple):
    """A row whose penalised tokens are listed on the device."""

    place: int
    tokens: TokenList
    text: list[int]


class Penalties:
    """Penalised tokens: which one joined the list of each text, and which one left it."""

    def __init__(self, heads: Heads, members: Sequence[Listed]) -> None:
        self._heads, self._members = heads, members
        rows = len(heads.words)
        self._rows: slice | list[int] = (
            slice(None) if len(members) == rows else [member.place for member in members]
        )
        self._texts = [member.text for member in members]
        self._windows = [
            (place, text, tokens.sustain) for place, tokens, text in members if tokens.sustain is not None
        ]
        self._spare, self._fresh = 0, False

    def write(self, grown: bool, more: array[int]) -> None:
        """Say what became of the lists; `grown` if every text is one token longer than before."""
        words = self._heads.words
        if not grown or self._spare <= 0:
            size = self._heads.size
            words[self._rows, LISTED : FRESH + 2] = [
                tokens.follow(text, more, size) for _, tokens, text in self._members
            ]
            self._spare, self._fresh = 0, True
            return
        words[self._rows, SIZE] += 1
        words[self._rows, JOINED] = [text[-1] for text in self._texts]
        for place, text, span in self._windows:
            words[place, LEFT] = text[-1 - span] if len(text) > span else -1
        if self._fresh:
            words[self._rows, FRESH + 1] = 0
            self._fresh = False

    def sent(self) -> None:
        """What was written is on its way."""
        for _, tokens, text in self._members:
            tokens.end = len(text)
        self._spare = self._spare - 1 if self._spare > 0 else min([m.tokens.spare for m in self._members])


class Fading:
    """Penalised tokens whose strengths change with every token."""

    def __init__(self, heads: Heads, members: Sequence[tuple[int, SamplerState, PenaltyRule]]) -> None:
        self._heads, self._members = heads, members

    def write(self, more: array[int]) -> None:
        """Say which tokens, how often and how strongly."""
        for place, state, rule in self._members:
            terms = state.penalty_terms(rule)
            self._heads.words[place, FADING : FADING + 2] = self._heads.size + len(more), len(terms.ids)
            more.extend(terms.ids)
            append(more, terms.counts)
            append(more, terms.strengths or (1.0,) * len(terms.ids))


class Repeats:
    """What DRY takes off which tokens."""

    def __init__(
        self, heads: Heads, members: Sequence[tuple[int, SamplerState, DryRule, Collection[int]]], width: int
    ) -> None:
        self._heads, self._members, self._width = heads, members, width

    def write(self, more: array[int]) -> None:
        """Say which tokens, and their costs."""
        words, size = self._heads
        words[:, DRY + 1] = 0
        for place, state, rule, breakers in self._members:
            costs = state.repeats(rule, breakers, self._width)
            if costs:
                words[place, DRY : DRY + 2] = size + len(more), len(costs)
                more.extend(costs)
                append(more, costs.values())


class Masks:
    """Which tokens a row allows; told anew for each token."""

    def __init__(self, heads: Heads, rows: Sequence[Row], width: int) -> None:
        self._heads, self._rows, self._width = heads, rows, width
        self._written = False

    def write(self, more: array[int]) -> bool:
        """Say where the bits of each row's mask are; whether there are any."""
        words, size = self._heads
        if self._written:
            words[:, ALLOWED] = 0
            self._written = False
        for place, row in enumerate(self._rows):
            if row.allowed is not None:
                words[place, ALLOWED] = size + len(more)
                more.extend(bits(row.allowed, self._width))
                self._written = True
        return self._written


class Targets:
    """Where mirostat's targets are, and where they will be."""

    def __init__(
        self, heads: Heads, members: Sequence[tuple[int, SamplerState]], device: torch.device
    ) -> None:
        self._heads, self._members, self._device = heads, members, device
        self._rows = [place for place, _ in members]
        self._read: list[Tensor] = []

    def write(self, positions: Sequence[int]) -> None:
        """Say where the target for each position is."""
        self._read.clear()
        known, base = None, 0
        addresses = [0] * len(self._members)
        for i, (place, state) in enumerate(self._members):
            found = state.last_target(positions[place])
            if found is not None:
                targets, which = found
                if targets is not known:
                    known, base = targets, self._address_of(targets)
                addresses[i] = base + TARGET_BYTES * which
        self._heads.words[self._rows, TARGET] = addresses

    def _address_of(self, targets: Tensor) -> int:
        if targets.device != self._device:
            targets = targets.to(self._device, non_blocking=True)
        self._read.append(targets)  # it must live until it was read
        return targets.data_ptr()

    def sent(self, positions: Sequence[int], targets: Tensor) -> None:
        """Remember where the targets will be."""
        for place, state in self._members:
            state.set_target(positions[place], targets, place)


def append(more: array[int], numbers: Collection[float]) -> None:
    """Append the bits of some numbers as float64."""
    more.frombytes(array("d", numbers).tobytes())


def bits(allowed: Tensor | Collection[int], width: int) -> array[int]:
    """Allowed tokens as a mask of bits in words of 64, long enough for the vocabulary."""
    packed = np.zeros(-(-width // 64) * 8, np.uint8)
    if isinstance(allowed, Tensor) and allowed.dtype == torch.int32:
        known = allowed.contiguous().numpy().view(np.uint8)
    else:
        mask = np.zeros(width, bool)
        if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
            mask[: len(allowed)] = allowed.numpy()[:width]
        else:
            ids: Collection[int] = allowed.tolist() if isinstance(allowed, Tensor) else allowed
            mask[[token for token in ids if 0 <= token < width]] = True
        known = np.packbits(mask, bitorder="little")
    packed[: len(known)] = known[: len(packed)]
    return array("q", packed.tobytes())
