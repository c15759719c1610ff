"""Sheets: what kernels write their answers on, many cut from one allocation, none of them used twice.

Tokens are written twice, the second time where the host can read them: then nothing is to be copied, and the
host waits for the tokens alone, not for what the device does afterwards. Who reads an answer is not known
here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUFFERS_PER_BLOCK = 32  # cut at a time
ALIGN_ELEMENTS = 16  # numbers after which an address is a multiple of 16 bytes


def allocate_buffers(count: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory for SHEETS times this many numbers (SHEETS, more), whose rows are aligned."""
    padded = -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    with torch.inference_mode(False):  # it outlives the call that it is made in
        return torch.empty(BUFFERS_PER_BLOCK, padded, dtype=dtype, device=device, pin_memory=pinned)


class HostTokens:
    """Tokens (rows,) that a kernel writes on the host; to be read after the event."""

    __slots__ = ("_event", "_tokens")

    def __init__(self, tokens: NDArray[np.int64], event: Any) -> None:
        self._tokens, self._event = tokens, event

    def tolist(self) -> list[int]:
        """The tokens; waits for the kernel."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class OutputBuffer(NamedTuple):
    """Memory for the tokens of a batch, their probabilities, and the tokens once more, for the host."""

    tokens: Tensor
    probs: Tensor
    host_copy: Tensor
    addresses: tuple[int, int, int]
    host_tokens: HostTokens


class OutputBufferPool:
    """Sheets for batches of one size, on one stream of a device; `event` is recorded after each use."""

    def __init__(self, count: int, device: torch.device, event: Any) -> None:
        self._count, self._device, self._event = count, device, event
        self._unused: list[OutputBuffer] = []

    def next(self) -> OutputBuffer:
        """One that nobody else has."""
        self.refill()
        return self._unused.pop()

    def refill(self) -> None:
        """Have some ready; best done while the device has enough to do."""
        if not self._unused:
            self._allocate()

    def _allocate(self) -> None:
        device, count, pinned = self._device, self._count, self._device.type == "cuda"
        blocks = [
            allocate_buffers(count, torch.int64, device),
            allocate_buffers(count, torch.float32, device),
        ]
        blocks.append(allocate_buffers(count, torch.int64, torch.device("cpu"), pinned))
        blocks[2][0].copy_(blocks[0][0], non_blocking=True)  # torch must know that the stream writes there
        for tokens, probs, host_copy in zip(*[part[:, :count].unbind() for part in blocks], strict=True):
            addresses = (tokens.data_ptr(), probs.data_ptr(), host_copy.data_ptr())
            self._unused.append(
                OutputBuffer(tokens, probs, host_copy, addresses, HostTokens(host_copy.numpy(), self._event))
            )


class MuBufferPool:
    """Sheets for mirostat's targets (rows,)."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._unused: list[Tensor] = []

    def next(self) -> Tensor:
        """One that nobody else has."""
        if not self._unused:
            block = allocate_buffers(self._count, torch.float64, self._device)
            self._unused.extend(block[:, : self._count].unbind())
        return self._unused.pop()
