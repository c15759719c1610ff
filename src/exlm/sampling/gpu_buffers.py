"""The memory between the host and the sampling kernels: pinned uploads, and outputs that the host can read.

Allocations and copies are made for many steps at a time, because each costs the host more than a step may.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.launch import cuda_driver

BUFFERS_PER_BLOCK = 32  # allocated at a time
ALIGN_ELEMENTS = 16  # numbers after which an address is a multiple of 16 bytes


def allocate_buffers(count: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory (BUFFERS_PER_BLOCK, count or more), whose rows are aligned."""
    padded = -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    with torch.inference_mode(False):  # the memory outlives the call that allocates it
        return torch.empty(BUFFERS_PER_BLOCK, padded, dtype=dtype, device=device, pin_memory=pinned)


class HostTokens:
    """Tokens (rows,) that the device writes into host memory; valid after the event."""

    __slots__ = ("_event", "_tokens")

    def __init__(self, tokens: NDArray[np.int64], event: Any) -> None:
        self._tokens, self._event = tokens, event

    def tolist(self) -> list[int]:
        """The tokens; waits for the event."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


def copy_to_host(tokens: Tensor) -> HostTokens:
    """Start copying tokens (rows,) from a CUDA device to the host, behind what is queued now."""
    cuda: Any = torch.cuda  # its events have no types
    copied, event = tokens.to("cpu", non_blocking=True), cuda.Event()  # the copy is pinned
    event.record(cuda.current_stream(tokens.device))
    return HostTokens(copied.numpy(), event)


class OutputBuffer(NamedTuple):
    """Memory for the tokens of a batch, their probabilities, and a copy of the tokens on the host."""

    tokens: Tensor
    probs: Tensor
    host_copy: Tensor
    addresses: tuple[int, int, int]
    host_tokens: HostTokens


class OutputAllocator:
    """Allocates output buffers for batches of one size, on one stream; the user records `event` after each use."""

    def __init__(self, count: int, device: torch.device, event: Any) -> None:
        self._count, self._device, self._event = count, device, event
        self._unused: list[OutputBuffer] = []

    def next(self) -> OutputBuffer:
        """A new buffer."""
        self.refill()
        return self._unused.pop()

    def refill(self) -> None:
        """Allocate some if none is left; best done while the device works."""
        if self._unused:
            return
        device, count, pinned = self._device, self._count, self._device.type == "cuda"
        tokens_block = allocate_buffers(count, torch.int64, device)
        probs_block = allocate_buffers(count, torch.float32, device)
        host_block = allocate_buffers(count, torch.int64, torch.device("cpu"), pinned)
        host_block[0].copy_(tokens_block[0], non_blocking=True)  # tells torch that the stream writes there
        blocks = [block[:, :count].unbind() for block in (tokens_block, probs_block, host_block)]
        for tokens, probs, host_copy in zip(*blocks, strict=True):
            addresses = (tokens.data_ptr(), probs.data_ptr(), host_copy.data_ptr())
            host_tokens = HostTokens(host_copy.numpy(), self._event)
            self._unused.append(OutputBuffer(tokens, probs, host_copy, addresses, host_tokens))


def allocate_mus(count: int, device: torch.device) -> Iterator[Tensor]:
    """Memory (rows,) for mirostat's targets, again and again."""
    while True:
        yield from allocate_buffers(count, torch.float64, device)[:, :count].unbind()


MIN_BUFFER_WORDS = 1024
WORD_BYTES = 8
BUFFERS_PER_CHUNK = 8  # buffers that share an event
MAX_CHUNK_WORDS = 1 << 16  # of a chunk of more than one buffer

WordArray = NDArray[np.int64]


class StagingRing:
    """Uploads int64 words to one device, in the order of one stream; an upload replaces the one before."""

    def __init__(self, device: torch.device, stream: int = 0) -> None:
        """For a device and the current stream, whose handle is given."""
        self._device, self._stream = device, stream
        self._rings_by_size: dict[int, _SizedRing] = {}

    def upload(self, words: WordArray, extra: array[int]) -> Tensor:
        """Upload both, one after the other; the tensor on the device may be longer."""
        count = words.size + len(extra)
        size = max(MIN_BUFFER_WORDS, 1 << (count - 1).bit_length())
        ring = self._rings_by_size.get(size)
        if ring is None:
            ring = self._rings_by_size[size] = _SizedRing(size, self._device, self._stream)
        return ring.upload(words, extra)


class _PinnedChunk:
    """Pinned buffers with their numpy views and addresses, and the event after their copies."""

    def __init__(self, size: int, pinned: bool) -> None:
        count = max(1, min(BUFFERS_PER_CHUNK, MAX_CHUNK_WORDS // size))
        buffers = torch.zeros(count, size, dtype=torch.int64, pin_memory=pinned).unbind()
        cuda: Any = torch.cuda  # its events have no types
        self.buffers = [(buffer, buffer.numpy(), ctypes.c_void_p(buffer.data_ptr())) for buffer in buffers]
        self.copied_event: Any = cuda.Event() if pinned else None

    def is_free(self) -> bool:
        return self.copied_event is None or bool(self.copied_event.query())


class _SizedRing:
    """Buffers of one size: one on the device, and as many on the host as are being copied at a time."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        self._size, self._pinned = size, device.type == "cuda"
        self._in_flight: deque[_PinnedChunk] = deque()
        with torch.inference_mode(False):  # the buffers outlive the call that allocates them
            self._device_buffer = torch.empty(size, dtype=torch.int64, device=device)
        self._chunk = self._new_chunk()
        self._unused = list(self._chunk.buffers)
        driver = cuda_driver() if self._pinned else None
        self._memcpy_h2d: Any = None if driver is None else driver.cuMemcpyHtoDAsync_v2
        self._device_address = ctypes.c_void_p(self._device_buffer.data_ptr())
        self._stream = ctypes.c_void_p(stream)

    def upload(self, words: WordArray, extra: array[int]) -> Tensor:
        if not self._unused:
            # The chunk that was copied longest ago, if its copies are done.
            self._chunk = self._in_flight.popleft() if self._in_flight[0].is_free() else self._new_chunk()
            self._unused.extend(self._chunk.buffers)
        buffer, values, host_address = self._unused.pop()
        count = words.size
        values[:count] = words
        if extra:
            values[count : count + len(extra)] = np.frombuffer(extra, np.int64)
            count += len(extra)
        # The driver's call has less overhead than torch's; if it fails, torch copies, or raises.
        if self._memcpy_h2d is None or self._memcpy_h2d(
            self._device_address, host_address, count * WORD_BYTES, self._stream
        ):
            self._device_buffer.copy_(buffer, non_blocking=True)
        if not self._unused:
            if self._chunk.copied_event is not None:
                self._chunk.copied_event.record()
            self._in_flight.append(self._chunk)
        return self._device_buffer

    def _new_chunk(self) -> _PinnedChunk:
        with torch.inference_mode(False):
            chunk = _PinnedChunk(self._size, self._pinned)
        # tells torch that the stream reads it
        self._device_buffer.copy_(chunk.buffers[0][0], non_blocking=True)
        return chunk
