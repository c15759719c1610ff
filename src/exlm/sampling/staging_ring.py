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

from .triton_launch import cuda_driver

MIN_BUFFER_WORDS = 1024
WORD_BYTES = 8  # bytes
BUFFERS_PER_CHUNK = 8  # buffers for which it is asked at once whether they have arrived
MAX_CHUNK_WORDS = 1 << 16  # words in a bundle of more than one

WordArray = NDArray[np.int64]


class StagingRing:
    """Sends int64 words to one device, for work that is queued on one stream.

    What is sent replaces what was sent before, when the device comes to it.
    """

    def __init__(self, device: torch.device, stream: int = 0) -> None:
        """To a device, on the current stream, whose handle is given."""
        self._device, self._stream = device, stream
        self._rings_by_size: dict[int, _SizedRing] = {}

    def upload(self, words: WordArray, extra: array[int]) -> Tensor:
        """Words and some more on the device, in one tensor that may be longer."""
        count = words.size + len(extra)
        size = max(MIN_BUFFER_WORDS, 1 << (count - 1).bit_length())
        ring = self._rings_by_size.get(size)
        if ring is None:
            ring = self._rings_by_size[size] = _SizedRing(size, self._device, self._stream)
        return ring.upload(words, extra)


class _PinnedChunk:
    """Some buffers on the host, each with its words as numpy has them, and the event that all arrived."""

    def __init__(self, size: int, pinned: bool) -> None:
        count = max(1, min(BUFFERS_PER_CHUNK, MAX_CHUNK_WORDS // size))
        buffers = torch.zeros(count, size, dtype=torch.int64, pin_memory=pinned).unbind()
        cuda: Any = torch.cuda  # its events have no types
        self.buffers = [(buffer, buffer.numpy(), ctypes.c_void_p(buffer.data_ptr())) for buffer in buffers]
        self.copied_event: Any = cuda.Event() if pinned else None

    def is_free(self) -> bool:
        return self.copied_event is None or bool(self.copied_event.query())


class _SizedRing:
    """Buffers of one size: one on the device, and as many on the host as are on their way at a time."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        self._size, self._pinned = size, device.type == "cuda"
        self._in_flight: deque[_PinnedChunk] = deque()
        with torch.inference_mode(False):  # they outlive the call that they are made in
            self._device_buffer = torch.empty(size, dtype=torch.int64, device=device)
        self._chunk = self._new_chunk()
        self._unused = list(self._chunk.buffers)
        library = cuda_driver() if self._pinned else None
        self._memcpy_h2d: Any = None if library is None else library.cuMemcpyHtoDAsync_v2
        self._device_address, self._stream = (
            ctypes.c_void_p(self._device_buffer.data_ptr()),
            ctypes.c_void_p(stream),
        )

    def upload(self, words: WordArray, extra: array[int]) -> Tensor:
        if not self._unused:
            self._chunk = self._reusable_chunk()
            self._unused.extend(self._chunk.buffers)
        buffer, values, host_address = self._unused.pop()
        count = words.size
        values[:count] = words
        if extra:
            values[count : count + len(extra)] = np.frombuffer(extra, np.int64)
            count += len(extra)
        # Without torch's preparations; what the driver refuses, torch does, or says why not.
        if self._memcpy_h2d is None or self._memcpy_h2d(
            self._device_address, host_address, count * WORD_BYTES, self._stream
        ):
            self._device_buffer.copy_(buffer, non_blocking=True)
        if not self._unused:
            if self._chunk.copied_event is not None:
                self._chunk.copied_event.record()
            self._in_flight.append(self._chunk)
        return self._device_buffer

    def _reusable_chunk(self) -> _PinnedChunk:
        """The buffers sent longest ago if they have arrived, else new ones."""
        return self._in_flight.popleft() if self._in_flight[0].is_free() else self._new_chunk()

    def _new_chunk(self) -> _PinnedChunk:
        with torch.inference_mode(False):
            chunk = _PinnedChunk(self._size, self._pinned)
        self._device_buffer.copy_(
            chunk.buffers[0][0], non_blocking=True
        )  # torch must know that the stream reads it
        return chunk
