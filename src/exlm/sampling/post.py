"""Post: carries words to a device without anybody waiting. What they mean is not its business."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .launch import driver

SMALLEST = 1024
WORD = 8  # bytes
BUNDLE = 8  # buffers for which it is asked at once whether they have arrived
LARGEST = 1 << 16  # words in a bundle of more than one

Words = NDArray[np.int64]


class Post:
    """Sends int64 words to one device, for work that is queued on one stream.

    What is sent replaces what was sent before, when the device comes to it.
    """

    def __init__(self, device: torch.device, stream: int = 0) -> None:
        """To a device, on the current stream, whose handle is given."""
        self._device, self._stream = device, stream
        self._routes: dict[int, _Route] = {}

    def send(self, words: Words, more: array[int]) -> Tensor:
        """Words and some more on the device, in one tensor that may be longer."""
        count = words.size + len(more)
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        route = self._routes.get(size)
        if route is None:
            route = self._routes[size] = _Route(size, self._device, self._stream)
        return route.send(words, more)


class _Bundle:
    """Some buffers on the host, each with its words as numpy has them, and the event that all arrived."""

    def __init__(self, size: int, pinned: bool) -> None:
        count = max(1, min(BUNDLE, LARGEST // size))
        buffers = torch.zeros(count, size, dtype=torch.int64, pin_memory=pinned).unbind()
        cuda: Any = torch.cuda  # its events have no types
        self.buffers = [(buffer, buffer.numpy(), ctypes.c_void_p(buffer.data_ptr())) for buffer in buffers]
        self.arrived: Any = cuda.Event() if pinned else None

    def is_free(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class _Route:
    """Buffers of one size: one on the device, and as many on the host as are on their way at a time."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        self._size, self._pinned = size, device.type == "cuda"
        self._sent: deque[_Bundle] = deque()
        with torch.inference_mode(False):  # they outlive the call that they are made in
            self._there = torch.empty(size, dtype=torch.int64, device=device)
        self._bundle = self._new()
        self._left = list(self._bundle.buffers)
        library = driver() if self._pinned else None
        self._copy: Any = None if library is None else library.cuMemcpyHtoDAsync_v2
        self._address, self._stream = ctypes.c_void_p(self._there.data_ptr()), ctypes.c_void_p(stream)

    def send(self, words: Words, more: array[int]) -> Tensor:
        if not self._left:
            self._bundle = self._free()
            self._left.extend(self._bundle.buffers)
        buffer, values, start = self._left.pop()
        count = words.size
        values[:count] = words
        if more:
            values[count : count + len(more)] = np.frombuffer(more, np.int64)
            count += len(more)
        # Without torch's preparations; what the driver refuses, torch does, or says why not.
        if self._copy is None or self._copy(self._address, start, count * WORD, self._stream):
            self._there.copy_(buffer, non_blocking=True)
        if not self._left:
            if self._bundle.arrived is not None:
                self._bundle.arrived.record()
            self._sent.append(self._bundle)
        return self._there

    def _free(self) -> _Bundle:
        """The buffers sent longest ago if they have arrived, else new ones."""
        return self._sent.popleft() if self._sent[0].is_free() else self._new()

    def _new(self) -> _Bundle:
        with torch.inference_mode(False):
            bundle = _Bundle(self._size, self._pinned)
        self._there.copy_(bundle.buffers[0][0], non_blocking=True)  # torch must know that the stream reads it
        return bundle
