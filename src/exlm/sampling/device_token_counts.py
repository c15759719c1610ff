"""TokenList: the tokens of a window over one text, on a device, each with how often it occurs.

As long as the text grows token by token the host sends which one joined the window and which one left, and a
kernel brings the list up to date; anything else makes a new list. It says what is penalised, not how much.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MIN_CAPACITY = 256
NO_TOKEN = -1

TokenCountsWords = tuple[int, int, int, int, int, int]
"""What the kernels are told: "token_counts" and "new_counts" of `lanes.PLACES`."""


class DeviceTokenCounts:
    """The last `sustain` tokens of a text (None: all of them), as pairs of a token and its count.

    `end` is the length of the text that the list on the device stands for once every word it gave was used.
    """

    def __init__(self, sustain: int | None, width: int, device: torch.device) -> None:
        """An empty list; ids that are not below `width` are left out."""
        self.sustain, self._width, self._device = sustain, width, device
        self.synced_length = -2  # not even of an empty text
        self._pairs: Tensor | None = None
        self._size_minus_length = self._capacity = self._address = 0

    @property
    def capacity_left(self) -> int:
        """For how many more tokens there is room."""
        return self._capacity - self._size_minus_length - self.synced_length

    def extend_words(self, history: Sequence[int]) -> TokenCountsWords:
        """The words for a text as it is now, if the list need not be made anew; see `follow`."""
        length, sustain = len(history), self.sustain
        left = history[length - 1 - sustain] if sustain is not None and length > sustain else NO_TOKEN
        return self._address, self._size_minus_length + length, history[-1], left, 0, 0

    def sync(self, history: Sequence[int], extra: array[int], extra_start: int) -> TokenCountsWords:
        """The words for a text as it is now; what else is to be sent is appended to `lists`.

        `first` is the place of its first word.
        """
        length = len(history)
        if length == self.synced_length:
            return self._address, self._size_minus_length + length, NO_TOKEN, NO_TOKEN, 0, 0
        if length == self.synced_length + 1 and self.capacity_left > 0:
            return self.extend_words(history)
        start = 0 if self.sustain is None else max(0, length - self.sustain)
        ids, counts = np.unique(np.array(history[start:], np.int64), return_counts=True)
        in_vocab = (ids >= 0) & (ids < self._width)
        pairs = np.stack((ids[in_vocab], counts[in_vocab]), 1)
        self._capacity = MIN_CAPACITY << (2 * len(pairs) // MIN_CAPACITY).bit_length()
        self._pairs = torch.full((self._capacity, 2), NO_TOKEN, dtype=torch.int32, device=self._device)
        self._address, self._size_minus_length = self._pairs.data_ptr(), len(pairs) - length
        self.synced_length = length
        list_start = extra_start + len(extra)
        extra.frombytes(pairs.tobytes())
        return self._address, len(pairs), NO_TOKEN, NO_TOKEN, list_start, len(pairs)
