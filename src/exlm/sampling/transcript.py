"""Transcript: a text on a device, where a kernel searches it for what it repeats.

As long as the text grows token by token the host sends the last one, and a kernel writes it down; whatever
else was appended is sent apart. It says what was written, not what is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAST_ROOM = 1024
STRANGE = -1  # stands for every id that the vocabulary does not have

Words = tuple[int, int, int]
"""What the kernels are told: "text" of `lanes.PLACES`."""


class Transcript:
    """A text as int32 ids.

    `end` is the length of the text that the device has once every word given was used.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """An empty one; ids that are not below `width` are strange."""
        self._width, self._device = width, device
        self.end = 0
        self._ids: Tensor | None = None
        self._room = self._address = 0

    @property
    def spare(self) -> int:
        """For how many more tokens there is room."""
        return self._room - self.end

    def follow(self, text: Sequence[int]) -> Words:
        """The words for a text as it is now; all but its last token are sent if the device lacks them."""
        length = len(text)
        if length > self._room or self._ids is None:
            self._room = max(LEAST_ROOM, 1 << (2 * length - 1).bit_length())
            self._ids = torch.empty(self._room, dtype=torch.int32, device=self._device)
            self._address, self.end = self._ids.data_ptr(), 0
        if length > self.end + 1:
            ids = np.array(text[self.end :], np.int64)
            ids[(ids < 0) | (ids >= self._width)] = STRANGE
            sent = torch.from_numpy(ids.astype(np.int32))
            if self._device.type == "cuda":
                sent = sent.pin_memory()
            self._ids[self.end : length].copy_(sent, non_blocking=True)
        self.end = length
        return self._address, length, text[-1] if length else STRANGE
