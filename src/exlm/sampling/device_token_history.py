"""Transcript: a text on a device, where a kernel searches it for what it repeats.

As long as the text grows token by token the host sends the last one, and a kernel writes it down; whatever
else was appended is sent apart. It says what was written, not what is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MIN_CAPACITY = 1024
OUT_OF_VOCAB = -1  # stands for every id that the vocabulary does not have

TokenHistoryWords = tuple[int, int, int]
"""What the kernels are told: "history" of `lanes.PLACES`."""


class DeviceTokenHistory:
    """A text as int32 ids.

    `end` is the length of the text that the device has once every word given was used.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """An empty one; ids that are not below `width` are strange."""
        self._width, self._device = width, device
        self.synced_length = 0
        self._ids: Tensor | None = None
        self._capacity = self._address = 0

    @property
    def capacity_left(self) -> int:
        """For how many more tokens there is room."""
        return self._capacity - self.synced_length

    def sync(self, history: Sequence[int]) -> TokenHistoryWords:
        """The words for a text as it is now; all but its last token are sent if the device lacks them."""
        length = len(history)
        if length > self._capacity or self._ids is None:
            self._capacity = max(MIN_CAPACITY, 1 << (2 * length - 1).bit_length())
            self._ids = torch.empty(self._capacity, dtype=torch.int32, device=self._device)
            self._address, self.synced_length = self._ids.data_ptr(), 0
        if length > self.synced_length + 1:
            ids = np.array(history[self.synced_length :], np.int64)
            ids[(ids < 0) | (ids >= self._width)] = OUT_OF_VOCAB
            host_ids = torch.from_numpy(ids.astype(np.int32))
            if self._device.type == "cuda":
                host_ids = host_ids.pin_memory()
            self._ids[self.synced_length : length].copy_(host_ids, non_blocking=True)
        self.synced_length = length
        return self._address, length, history[-1] if length else OUT_OF_VOCAB
