"""Weights on their way to a GPU through a few pinned buffers, so that the disk and the device work at a time.

A copy from pinned memory is made by the device while the reader fills the next buffer; from other memory the
driver makes one piece after the other and the reader waits. Only what goes to a GPU as it is stored comes by
here: numbers that are converted on the way are converted by the device, and their reader hands them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from .. import env
from ..checkpoint import Source
from ..checkpoint.source import Wrapped
from ..formats import DenseWeight, PackedWeight, Weight
from .devices import DeviceInfo

BUFFERS = 6
"""Two for each thread that reads ahead: one is filled while the other is sent."""

BYTES = 16 << 20
"""Of one buffer."""

CPU = torch.device("cpu")


class Mark(Protocol):
    """A copy that was begun."""

    def synchronize(self) -> None:
        """Wait until it and all that were begun before it are made."""
        ...


class Port(Protocol):
    """The way onto a device."""

    def buffer(self, size: int) -> Tensor:
        """Bytes on the host that the device can read by itself."""
        ...

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the same kind on the device."""
        ...

    def send(self, source: Tensor, target: Tensor) -> Mark:
        """Begin to copy bytes from a buffer to the device; they must stay as they are until it is done."""
        ...


class CudaPort:
    """To a GPU, in the order of its current stream: behind what may still use memory that is given out."""

    def buffer(self, size: int) -> Tensor:
        """Pinned bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Memory of the device, with nothing in it yet."""
        return torch.empty_like(tensor, device=device)

    def send(self, source: Tensor, target: Tensor) -> Mark:
        """A copy that the host does not wait for."""
        with torch.cuda.device(target.device):
            target.copy_(source, non_blocking=True)
            mark = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            mark.record()
        return mark


@dataclass
class Buffer:
    """Bytes to pass through, and what was sent from them last."""

    memory: Tensor | None = None
    mark: Mark | None = None


class Ring:
    """A few buffers that any number of threads send tensors through; made when they are first needed."""

    def __init__(self, port: Port, count: int = BUFFERS, size: int = BYTES) -> None:
        self._port, self._size = port, size
        self._buffers: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(count):
            self._buffers.put(Buffer())

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The same tensor on the device, all of it there."""
        if not tensor.is_contiguous() or not tensor.numel():
            return tensor.to(device)
        target = self._port.room(tensor, device)
        source, goal = _bytes(tensor), _bytes(target)
        marks = [
            self._pass(source[start : start + self._size], goal[start : start + self._size])
            for start in range(0, len(source), self._size)
        ]
        marks[-1].synchronize()
        return target

    def _pass(self, source: Tensor, target: Tensor) -> Mark:
        """Fill the buffer that has waited longest, and send it off."""
        buffer = self._buffers.get()
        try:
            if buffer.mark is not None:
                buffer.mark.synchronize()
            if buffer.memory is None:
                buffer.memory = self._port.buffer(self._size)
            filled = buffer.memory[: len(source)].copy_(source)
            buffer.mark = self._port.send(filled, target)
            return buffer.mark
        finally:
            self._buffers.put(buffer)


class StagedSource(Wrapped):
    """A source whose matrices go to GPUs through a ring."""

    def __init__(self, inner: Source, ring: Ring) -> None:
        super().__init__(inner)
        self._ring = ring

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """A matrix to multiply with, on its device."""
        staged = device.type == "cuda" and self._as_stored(role, fallback, dtype)
        weight = super().weight(
            role,
            in_features,
            out_features,
            bias=bias,
            dtype=dtype,
            device=CPU if staged else device,
            fallback=fallback,
        )
        if not staged:
            return weight
        if isinstance(weight, PackedWeight):
            return weight.map(lambda tensor: self._ring.move(tensor, device))
        if isinstance(weight, DenseWeight):
            own = None if weight.bias is None else self._ring.move(weight.bias, device)
            return DenseWeight(self._ring.move(weight.data, device), own)
        return weight.to(device)

    def _as_stored(self, role: str, fallback: str | None, dtype: torch.dtype | None) -> bool:
        """Whether reading changes nothing: codes, or floats of the wanted type."""
        words, _ = self.describe(role, fallback)
        kind, _, stored = words.partition(" ")
        return kind != "dense" or dtype is None or stored == str(dtype).removeprefix("torch.")


def staged(source: Source, device_infos: Sequence[DeviceInfo]) -> Source:
    """The source itself, or through a ring if that is wanted, it reads files and something goes to a GPU."""
    to_gpu = any(device_info.device.type == "cuda" for device_info in device_infos)
    if env.staging_enabled() and source.files.paths and to_gpu:
        return StagedSource(source, Ring(CudaPort()))
    return source


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place."""
    return tensor.view(-1).view(torch.uint8)
