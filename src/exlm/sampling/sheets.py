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

SHEETS = 32  # cut at a time
PADDED = 16  # numbers after which an address is a multiple of 16 bytes


def cut(count: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory for SHEETS times this many numbers (SHEETS, more), whose rows are aligned."""
    padded = -(-count // PADDED) * PADDED
    with torch.inference_mode(False):  # it outlives the call that it is made in
        return torch.empty(SHEETS, padded, dtype=dtype, device=device, pin_memory=pinned)


class Told:
    """Tokens (rows,) that a kernel writes on the host; to be read after the event."""

    __slots__ = ("_event", "_numbers")

    def __init__(self, numbers: NDArray[np.int64], event: Any) -> None:
        self._numbers, self._event = numbers, event

    def tolist(self) -> list[int]:
        """The tokens; waits for the kernel."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._numbers.tolist()
        return tokens


class Sheet(NamedTuple):
    """Memory for the tokens of a batch, their probabilities, and the tokens once more, for the host."""

    tokens: Tensor
    shares: Tensor
    copy: Tensor
    addresses: tuple[int, int, int]
    told: Told


class Sheets:
    """Sheets for batches of one size, on one stream of a device; `event` is recorded after each use."""

    def __init__(self, count: int, device: torch.device, event: Any) -> None:
        self._count, self._device, self._event = count, device, event
        self._left: list[Sheet] = []

    def next(self) -> Sheet:
        """One that nobody else has."""
        self.restock()
        return self._left.pop()

    def restock(self) -> None:
        """Have some ready; best done while the device has enough to do."""
        if not self._left:
            self._cut()

    def _cut(self) -> None:
        device, count, pinned = self._device, self._count, self._device.type == "cuda"
        whole = [cut(count, torch.int64, device), cut(count, torch.float32, device)]
        whole.append(cut(count, torch.int64, torch.device("cpu"), pinned))
        whole[2][0].copy_(whole[0][0], non_blocking=True)  # torch must know that the stream writes there
        for tokens, shares, copy in zip(*[part[:, :count].unbind() for part in whole], strict=True):
            addresses = (tokens.data_ptr(), shares.data_ptr(), copy.data_ptr())
            self._left.append(Sheet(tokens, shares, copy, addresses, Told(copy.numpy(), self._event)))


class Targets:
    """Sheets for mirostat's targets (rows,)."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._left: list[Tensor] = []

    def next(self) -> Tensor:
        """One that nobody else has."""
        if not self._left:
            block = cut(self._count, torch.float64, self._device)
            self._left.extend(block[:, : self._count].unbind())
        return self._left.pop()
