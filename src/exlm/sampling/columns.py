"""Columns: what is written into the heads of a party's rows for each token, one class for each feature.

Each knows the rows it is about and writes their words; lists that a word refers to are appended to `more`,
whose first word stands at `Heads.size`. Nothing here chooses a token or launches anything.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from operator import is_, itemgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .lanes import AT
from .listed import NOBODY, TokenList
from .penalties import PenaltyRule
from .rows import Row
from .state import SamplerState, Target
from .transcript import Transcript

TARGET, FADING, ALLOWED = AT["target"], AT["fading"], AT["allowed"]
LISTED, FRESH = AT["listed"], AT["fresh"]
SIZE, JOINED, LEFT = LISTED + 1, LISTED + 2, LISTED + 3
TEXT, LAST = AT["text"], AT["text"] + 2
WORD = 8  # bytes
LAST_OF = itemgetter(-1)


class Heads(NamedTuple):
    """The heads of some rows (rows, HEAD), and how many words are sent before `more`."""

    words: NDArray[np.int64]
    size: int


class Listed(NamedTuple):
    """A row whose penalised tokens are listed on the device."""

    place: int
    tokens: TokenList
    text: list[int]


class Written(NamedTuple):
    """A row whose text is on the device."""

    place: int
    transcript: Transcript
    text: list[int]


class Lasts:
    """The last token of each text, in one column. They are packed first, because numpy is slow with lists."""

    def __init__(self, heads: Heads, places: list[int], column: int, texts: list[list[int]]) -> None:
        self._words, self._texts = heads.words, texts
        self._where = rows_of(places, heads), column
        self._pack, self._bytes = struct.Struct(f"{len(texts)}q").pack_into, bytearray(WORD * len(texts))
        self._tokens = np.frombuffer(self._bytes, np.int64)

    def write(self) -> None:
        """Write them; no text is empty."""
        self._pack(self._bytes, 0, *map(LAST_OF, self._texts))
        self._words[self._where] = self._tokens


class Penalties:
    """Penalised tokens: which one joined the list of each text, and which one left it.

    What can be said of the next token before it is known is written as soon as the device has enough to do.
    """

    def __init__(self, heads: Heads, members: Sequence[Listed]) -> None:
        self._words, self._size, self._members = heads.words, heads.size, members
        places = [member.place for member in members]
        self._rows = rows_of(places, heads)
        self._texts = [member.text for member in members]
        self._tokens = [member.tokens for member in members]
        self._lasts = Lasts(heads, places, JOINED, self._texts)
        self._windows = [(place, text, tokens.sustain) for place, tokens, text in members if tokens.sustain]
        self._empty = [place for place, tokens, _ in members if tokens.sustain == 0]
        self._spare = 0

    def write(self, grown: bool, more: array[int]) -> None:
        """Say what became of the lists; `grown` if every text is one token longer than before."""
        if grown and self._spare > 0:
            self._lasts.write()
            if self._empty:
                self._words[self._empty, LEFT] = self._words[self._empty, JOINED]
            return
        self._words[self._rows, LISTED : FRESH + 2] = [
            tokens.follow(text, more, self._size) for _, tokens, text in self._members
        ]
        self._spare = 0

    def sent(self) -> None:
        """What was written is on its way."""
        for tokens, text in zip(self._tokens, self._texts, strict=True):
            tokens.end = len(text)
        if self._spare > 0:
            self._spare -= 1
        else:
            self._spare = min([tokens.spare for tokens in self._tokens])
            self._words[self._rows, FRESH + 1] = 0
        self._words[self._rows, SIZE] += 1
        for place, text, span in self._windows:
            self._words[place, LEFT] = text[-span] if len(text) >= span else NOBODY


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


class Texts:
    """What DRY searches: which token each text ends with now."""

    def __init__(self, heads: Heads, members: Sequence[Written]) -> None:
        self._words, self._members = heads.words, members
        places = [member.place for member in members]
        self._rows = rows_of(places, heads)
        self._texts = [member.text for member in members]
        self._lasts = Lasts(heads, places, LAST, self._texts)
        self._transcripts = [member.transcript for member in members]
        self._spare = 0

    def write(self, grown: bool) -> None:
        """Say how the texts end; `grown` if every text is one token longer than before."""
        if grown and self._spare > 0:
            self._lasts.write()
            return
        self._words[self._rows, TEXT : LAST + 1] = [
            transcript.follow(text) for _, transcript, text in self._members
        ]
        self._spare = 0

    def sent(self) -> None:
        """What was written is on its way."""
        for transcript, text in zip(self._transcripts, self._texts, strict=True):
            transcript.end = len(text)
        self._spare = self._spare - 1 if self._spare > 0 else min([each.spare for each in self._transcripts])
        self._words[self._rows, TEXT + 1] += 1


class Masks:
    """Which tokens a row allows; told anew for each token."""

    def __init__(self, heads: Heads, rows: Sequence[Row], width: int) -> None:
        self._heads, self._rows, self._width = heads, rows, width
        self._written = False

    def write(self, masked: bool, more: array[int]) -> bool:
        """Say where the bits of each row's mask are, if rows are `masked`; whether there are any."""
        words, size = self._heads
        if self._written:
            words[:, ALLOWED] = 0
            self._written = False
        for place, row in enumerate(self._rows) if masked else ():
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
        self._words, self._members, self._device = heads.words, members, device
        places = [place for place, _ in members]
        self._rows, self._offsets = rows_of(places, heads), np.array(places) * WORD
        self._known = [state.targets for _, state in members]
        self._read: list[Tensor] = []
        self._last: list[Target] = []

    def write(self, grown: bool, positions: Sequence[int]) -> None:
        """Say where the target for each position is; `grown` if all are the next ones."""
        if grown and all(map(is_, [known[-1] for known in self._known], self._last)):
            return
        self._read.clear()
        known, base = None, 0
        addresses = [0] * len(self._members)
        for i, (place, state) in enumerate(self._members):
            found = state.last_target(positions[place])
            if found is not None:
                _, targets, which = found
                if targets is not known:
                    known, base = targets, self._address_of(targets)
                addresses[i] = base + WORD * which
        self._words[self._rows, TARGET] = addresses

    def _address_of(self, targets: Tensor) -> int:
        if targets.device != self._device:
            targets = targets.to(self._device, non_blocking=True)
        self._read.append(targets)  # it must live until it was read
        return targets.data_ptr()

    def sent(self, positions: Sequence[int], targets: Tensor) -> None:
        """Remember where the targets will be, and say so for the next tokens."""
        self._last = [state.set_target(positions[place], targets, place) for place, state in self._members]
        self._words[self._rows, TARGET] = targets.data_ptr() + self._offsets


def rows_of(places: list[int], heads: Heads) -> slice | list[int]:
    """Some rows as an index; all of them are quicker to write."""
    return slice(None) if len(places) == len(heads.words) else places


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
