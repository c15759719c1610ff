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

from ..kernels.sampling_layout import HEADER_OFFSETS
from .device_token_counts import NO_TOKEN, DeviceTokenCounts
from .device_token_history import DeviceTokenHistory
from .penalties import PenaltyRule
from .request import SamplingRequest
from .state import MuRecord, SamplerState

MU_OFFSET, DECAY_OFFSET, ALLOWED_OFFSET = (
    HEADER_OFFSETS["mu"],
    HEADER_OFFSETS["decaying"],
    HEADER_OFFSETS["allowed"],
)
COUNTS_OFFSET, NEW_COUNTS_OFFSET = HEADER_OFFSETS["token_counts"], HEADER_OFFSETS["new_counts"]
COUNTS_SIZE_OFFSET, ENTERED_OFFSET, LEFT_OFFSET = COUNTS_OFFSET + 1, COUNTS_OFFSET + 2, COUNTS_OFFSET + 3
HISTORY_OFFSET, LAST_TOKEN_OFFSET = HEADER_OFFSETS["history"], HEADER_OFFSETS["history"] + 2
WORD_BYTES = 8  # bytes
LAST_ITEM = itemgetter(-1)


class RowHeaders(NamedTuple):
    """The heads of some rows (rows, HEAD), and how many words are sent before `more`."""

    words: NDArray[np.int64]
    num_words: int


class CountedRow(NamedTuple):
    """A row whose penalised tokens are listed on the device."""

    row: int
    counts: DeviceTokenCounts
    history: list[int]


class HistoryRow(NamedTuple):
    """A row whose text is on the device."""

    row: int
    device_history: DeviceTokenHistory
    history: list[int]


class LastTokenWriter:
    """The last token of each text, in one column. They are packed first, because numpy is slow with lists."""

    def __init__(
        self, headers: RowHeaders, row_numbers: list[int], column: int, histories: list[list[int]]
    ) -> None:
        self._words, self._histories = headers.words, histories
        self._target_cells = row_index(row_numbers, headers), column
        self._pack, self._bytes = (
            struct.Struct(f"{len(histories)}q").pack_into,
            bytearray(WORD_BYTES * len(histories)),
        )
        self._tokens = np.frombuffer(self._bytes, np.int64)

    def write(self) -> None:
        """Write them; no text is empty."""
        self._pack(self._bytes, 0, *map(LAST_ITEM, self._histories))
        self._words[self._target_cells] = self._tokens


class PenaltyWriter:
    """Penalised tokens: which one joined the list of each text, and which one left it.

    What can be said of the next token before it is known is written as soon as the device has enough to do.
    """

    def __init__(self, headers: RowHeaders, members: Sequence[CountedRow]) -> None:
        self._words, self._size, self._members = headers.words, headers.num_words, members
        row_numbers = [member.row for member in members]
        self._rows = row_index(row_numbers, headers)
        self._histories = [member.history for member in members]
        self._counts = [member.counts for member in members]
        self._last_token_writer = LastTokenWriter(headers, row_numbers, ENTERED_OFFSET, self._histories)
        self._windows = [(row, history, counts.sustain) for row, counts, history in members if counts.sustain]
        self._empty_windows = [row for row, counts, _ in members if counts.sustain == 0]
        self._capacity_left = 0

    def write(self, grew_by_one: bool, extra: array[int]) -> None:
        """Say what became of the lists; `grown` if every text is one token longer than before."""
        if grew_by_one and self._capacity_left > 0:
            self._last_token_writer.write()
            if self._empty_windows:
                self._words[self._empty_windows, LEFT_OFFSET] = self._words[
                    self._empty_windows, ENTERED_OFFSET
                ]
            return
        self._words[self._rows, COUNTS_OFFSET : NEW_COUNTS_OFFSET + 2] = [
            counts.sync(history, extra, self._size) for _, counts, history in self._members
        ]
        self._capacity_left = 0

    def after_send(self) -> None:
        """What was written is on its way."""
        for counts, history in zip(self._counts, self._histories, strict=True):
            counts.synced_length = len(history)
        if self._capacity_left > 0:
            self._capacity_left -= 1
        else:
            self._capacity_left = min([counts.capacity_left for counts in self._counts])
            self._words[self._rows, NEW_COUNTS_OFFSET + 1] = 0
        self._words[self._rows, COUNTS_SIZE_OFFSET] += 1
        for row, history, sustain in self._windows:
            self._words[row, LEFT_OFFSET] = history[-sustain] if len(history) >= sustain else NO_TOKEN


class DecayWriter:
    """Penalised tokens whose strengths change with every token."""

    def __init__(self, headers: RowHeaders, members: Sequence[tuple[int, SamplerState, PenaltyRule]]) -> None:
        self._headers, self._members = headers, members

    def write(self, extra: array[int]) -> None:
        """Say which tokens, how often and how strongly."""
        for row, state, rule in self._members:
            terms = state.penalty_terms(rule)
            self._headers.words[row, DECAY_OFFSET : DECAY_OFFSET + 2] = (
                self._headers.num_words + len(extra),
                len(terms.ids),
            )
            extra.extend(terms.ids)
            append_float64(extra, terms.counts)
            append_float64(extra, terms.strengths or (1.0,) * len(terms.ids))


class HistoryWriter:
    """What DRY searches: which token each text ends with now."""

    def __init__(self, headers: RowHeaders, members: Sequence[HistoryRow]) -> None:
        self._words, self._members = headers.words, members
        row_numbers = [member.row for member in members]
        self._rows = row_index(row_numbers, headers)
        self._histories = [member.history for member in members]
        self._last_token_writer = LastTokenWriter(headers, row_numbers, LAST_TOKEN_OFFSET, self._histories)
        self._device_histories = [member.device_history for member in members]
        self._capacity_left = 0

    def write(self, grew_by_one: bool) -> None:
        """Say how the texts end; `grown` if every text is one token longer than before."""
        if grew_by_one and self._capacity_left > 0:
            self._last_token_writer.write()
            return
        self._words[self._rows, HISTORY_OFFSET : LAST_TOKEN_OFFSET + 1] = [
            device_history.sync(history) for _, device_history, history in self._members
        ]
        self._capacity_left = 0

    def after_send(self) -> None:
        """What was written is on its way."""
        for device_history, history in zip(self._device_histories, self._histories, strict=True):
            device_history.synced_length = len(history)
        self._capacity_left = (
            self._capacity_left - 1
            if self._capacity_left > 0
            else min([each.capacity_left for each in self._device_histories])
        )
        self._words[self._rows, HISTORY_OFFSET + 1] += 1


class MaskWriter:
    """Which tokens a row allows; told anew for each token."""

    def __init__(self, headers: RowHeaders, requests: Sequence[SamplingRequest], width: int) -> None:
        self._headers, self._requests, self._width = headers, requests, width
        self._written = False

    def write(self, has_masks: bool, extra: array[int]) -> bool:
        """Say where the bits of each row's mask are, if rows are `masked`; whether there are any."""
        words, size = self._headers
        if self._written:
            words[:, ALLOWED_OFFSET] = 0
            self._written = False
        for row, request in enumerate(self._requests) if has_masks else ():
            if request.allowed is not None:
                words[row, ALLOWED_OFFSET] = size + len(extra)
                extra.extend(pack_allowed(request.allowed, self._width))
                self._written = True
        return self._written


class MuWriter:
    """Where mirostat's targets are, and where they will be."""

    def __init__(
        self, headers: RowHeaders, members: Sequence[tuple[int, SamplerState]], device: torch.device
    ) -> None:
        self._words, self._members, self._device = headers.words, members, device
        row_numbers = [row for row, _ in members]
        self._rows, self._offsets = row_index(row_numbers, headers), np.array(row_numbers) * WORD_BYTES
        self._mu_histories = [state.mu_history for _, state in members]
        self._keep_alive: list[Tensor] = []
        self._last_records: list[MuRecord] = []

    def write(self, grew_by_one: bool, positions: Sequence[int]) -> None:
        """Say where the target for each position is; `grown` if all are the next ones."""
        if grew_by_one and all(
            map(is_, [previous_mus[-1] for previous_mus in self._mu_histories], self._last_records)
        ):
            return
        self._keep_alive.clear()
        previous_mus, base = None, 0
        addresses = [0] * len(self._members)
        for i, (row, state) in enumerate(self._members):
            record = state.mu_record_before(positions[row])
            if record is not None:
                _, mus, index = record
                if mus is not previous_mus:
                    previous_mus, base = mus, self._address_of(mus)
                addresses[i] = base + WORD_BYTES * index
        self._words[self._rows, MU_OFFSET] = addresses

    def _address_of(self, mus: Tensor) -> int:
        if mus.device != self._device:
            mus = mus.to(self._device, non_blocking=True)
        self._keep_alive.append(mus)  # it must live until it was read
        return mus.data_ptr()

    def after_send(self, positions: Sequence[int], mus: Tensor) -> None:
        """Remember where the targets will be, and say so for the next tokens."""
        self._last_records = [state.record_mu(positions[row], mus, row) for row, state in self._members]
        self._words[self._rows, MU_OFFSET] = mus.data_ptr() + self._offsets


def row_index(row_numbers: list[int], headers: RowHeaders) -> slice | list[int]:
    """Some rows as an index; all of them are quicker to write."""
    return slice(None) if len(row_numbers) == len(headers.words) else row_numbers


def append_float64(extra: array[int], values: Collection[float]) -> None:
    """Append the bits of some numbers as float64."""
    extra.frombytes(array("d", values).tobytes())


def pack_allowed(allowed: Tensor | Collection[int], width: int) -> array[int]:
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
