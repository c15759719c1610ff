"""Orders between processes: a few numbers and tensors over a socket, as JSON and raw bytes. Never pickles."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LONGEST = 1 << 24
"""Bytes of an order, tensors not counted."""

FLOATS = torch.float32, torch.float16, torch.bfloat16
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.int64, torch.int32, torch.bool, *FLOATS)}


@dataclass(frozen=True)
class Message:
    """What to do, with which values and tensors."""

    action: str
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Channel:
    """One end of a line between two processes. `EOFError` or `OSError` says that the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Hand over an order; it may not have been read yet when this returns."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
        kinds = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in tensors.items()
        }
        head = json.dumps([message.action, dict(message.values), kinds]).encode()
        self.connection.sendall(b"".join([struct.pack("<Q", len(head)), head, *map(_raw, tensors.values())]))

    def receive(self) -> Message:
        """Wait for an order."""
        head = bytearray(8)
        self._fill(memoryview(head))
        (length,) = struct.unpack("<Q", head)
        if length > LONGEST:
            raise EOFError(f"{length} bytes announced: not an order")
        text = bytearray(length)
        self._fill(memoryview(text))
        do, values, kinds = json.loads(text)
        tensors = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in kinds.items()}
        for tensor in tensors.values():
            self._fill(_raw(tensor))
        return Message(do, values, tensors)

    def close(self) -> None:
        """End the line: the other end reads EOF."""
        self.connection.close()

    def _fill(self, view: memoryview) -> None:
        while view:
            got = self.connection.recv_into(view)
            if got == 0:
                raise EOFError("the other process has closed the line")
            view = view[got:]


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data
