"""Post: carries words to a device without anybody waiting. What they mean is not its business."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALLEST = 1024

Words = NDArray[np.int64]


class Post:
    """Sends int64 words to one device, for work that is queued on one stream.

    What is sent replaces what was sent before, when the device comes to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._routes: dict[int, _Route] = {}

    def send(self, words: Words, more: array[int]) -> Tensor:
        """Words and some more on the device, in one tensor that may be longer."""
        count = words.size + len(more)
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        route = self._routes.get(size)
        if route is None:
            route = self._routes[size] = _Route(size, self._device)
        return route.send(words, more)


class _Route:
    """Buffers of one size: one on the device, and as many on the host as are on their way at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._there = torch.empty(size, dtype=torch.int64, device=device)
        self._pinned = device.type == "cuda"
        self._sent: deque[tuple[Tensor, Words, Any]] = deque()

    def send(self, words: Words, more: array[int]) -> Tensor:
        buffer, values, arrived = self._free()
        values[: words.size] = words
        if more:
            values[words.size : words.size + len(more)] = np.frombuffer(more, np.int64)
        self._there.copy_(buffer, non_blocking=True)
        if arrived is not None:
            arrived.record()
        self._sent.append((buffer, values, arrived))
        return self._there

    def _free(self) -> tuple[Tensor, Words, Any]:
        """The buffer sent longest ago if it has arrived, else a new one."""
        if self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            return self._sent.popleft()
        buffer = torch.zeros(len(self._there), dtype=torch.int64, pin_memory=self._pinned)
        cuda: Any = torch.cuda  # its events have no types
        return buffer, buffer.numpy(), cuda.Event() if self._pinned else None
