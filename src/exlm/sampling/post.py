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
BUNDLE = 8  # buffers for which it is asked at once whether they have arrived
LARGEST = 1 << 16  # words in a bundle of more than one

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


class _Bundle:
    """Some buffers on the host, each with its words as numpy has them, and the event that all arrived."""

    def __init__(self, size: int, pinned: bool) -> None:
        count = max(1, min(BUNDLE, LARGEST // size))
        buffers = torch.zeros(count, size, dtype=torch.int64, pin_memory=pinned).unbind()
        cuda: Any = torch.cuda  # its events have no types
        self.buffers = [(buffer, buffer.numpy()) for buffer in buffers]
        self.arrived: Any = cuda.Event() if pinned else None

    def is_free(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class _Route:
    """Buffers of one size: one on the device, and as many on the host as are on their way at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._pinned = size, device.type == "cuda"
        self._sent: deque[_Bundle] = deque()
        with torch.inference_mode(False):  # they outlive the call that they are made in
            self._there = torch.empty(size, dtype=torch.int64, device=device)
            self._bundle = _Bundle(size, self._pinned)
        self._left = list(self._bundle.buffers)

    def send(self, words: Words, more: array[int]) -> Tensor:
        if not self._left:
            self._bundle = self._free()
            self._left.extend(self._bundle.buffers)
        buffer, values = self._left.pop()
        values[: words.size] = words
        if more:
            values[words.size : words.size + len(more)] = np.frombuffer(more, np.int64)
        self._there.copy_(buffer, non_blocking=True)
        if not self._left:
            if self._bundle.arrived is not None:
                self._bundle.arrived.record()
            self._sent.append(self._bundle)
        return self._there

    def _free(self) -> _Bundle:
        """The buffers sent longest ago if they have arrived, else new ones."""
        if self._sent[0].is_free():
            return self._sent.popleft()
        with torch.inference_mode(False):
            return _Bundle(self._size, self._pinned)
