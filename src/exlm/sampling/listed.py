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

LEAST_ROOM = 256
NOBODY = -1

Words = tuple[int, int, int, int, int, int]
"""What the kernels are told: "listed" and "fresh" of `lanes.PLACES`."""


class TokenList:
    """The last `sustain` tokens of a text (None: all of them), as pairs of a token and its count.

    `end` is the length of the text that the list on the device stands for once every word it gave was used.
    """

    def __init__(self, sustain: int | None, width: int, device: torch.device) -> None:
        """An empty list; ids that are not below `width` are left out."""
        self.sustain, self._width, self._device = sustain, width, device
        self.end = -2  # not even of an empty text
        self._pairs: Tensor | None = None
        self._offset = self._room = self._address = 0

    @property
    def spare(self) -> int:
        """For how many more tokens there is room."""
        return self._room - self._offset - self.end

    def joined(self, text: Sequence[int]) -> Words:
        """The words for a text as it is now, if the list need not be made anew; see `follow`."""
        length, span = len(text), self.sustain
        left = text[length - 1 - span] if span is not None and length > span else NOBODY
        return self._address, self._offset + length, text[-1], left, 0, 0

    def follow(self, text: Sequence[int], lists: array[int], first: int) -> Words:
        """The words for a text as it is now; what else is to be sent is appended to `lists`.

        `first` is the place of its first word.
        """
        length = len(text)
        if length == self.end:
            return self._address, self._offset + length, NOBODY, NOBODY, 0, 0
        if length == self.end + 1 and self.spare > 0:
            return self.joined(text)
        start = 0 if self.sustain is None else max(0, length - self.sustain)
        ids, counts = np.unique(np.array(text[start:], np.int64), return_counts=True)
        known = (ids >= 0) & (ids < self._width)
        pairs = np.stack((ids[known], counts[known]), 1)
        self._room = LEAST_ROOM << (2 * len(pairs) // LEAST_ROOM).bit_length()
        self._pairs = torch.full((self._room, 2), NOBODY, dtype=torch.int32, device=self._device)
        self._address, self._offset = self._pairs.data_ptr(), len(pairs) - length
        self.end = length
        at = first + len(lists)
        lists.frombytes(pairs.tobytes())
        return self._address, len(pairs), NOBODY, NOBODY, at, len(pairs)
