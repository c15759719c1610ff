"""How ranks communicate: collectives on tensors (`Group`), messages between driver and workers (`Channel`).

A `Group` is torch.distributed's process group without its global state. A `Channel` is a socket that carries
messages, a few numbers and tensors as JSON and raw bytes; never pickles.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..errors import Unsupported

T = TypeVar("T")

COLLECTIVE_TIMEOUT = 300
"""Seconds that a rank waits for the others in a collective."""

MAX_HEADER_BYTES = 1 << 24
"""Largest message, tensors not counted."""

FLOATS = torch.float32, torch.float16, torch.bfloat16
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.int64, torch.int32, torch.bool, *FLOATS)}

_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class GroupBroken(RuntimeError):
    """A collective failed; the message is the transport's."""


class Group:
    """A process group as one rank sees it: NCCL between GPUs, gloo between CPUs or without NCCL."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, local: bool) -> None:
        """Find the other ranks by `store`; `local`: all of them are on this machine."""
        self.rank, self.size, self.device = rank, size, device
        if not dist.is_available():
            raise Unsupported("This build of torch cannot work in several processes: install another one.")
        self.nccl = device.type == "cuda" and dist.is_nccl_available()
        self._transport: Any = self._translate_errors(lambda: self._open(store, local))
        _open_groups.add(self)
        self.sum(torch.zeros(1, device=device))  # waits for all ranks; the store is not needed afterwards

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks, the same bits on each, maybe in place; gloo adds in float32."""
        total = x.contiguous() if self.nccl else x.float().contiguous()
        self._wait(lambda: self._transport.allreduce([total]))
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        """Write rank 0's tensor over that of every other rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(lambda: self._transport.broadcast([x], options))
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """All ranks' tensors, which have one shape, on rank 0; an empty list elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = 0
        out = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(lambda: self._transport.gather([out] if out else [], [x.contiguous()], options))
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to one rank, which calls `receive`."""
        self._wait(lambda: self._transport.send([x.contiguous()], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Write what one rank sends over a tensor of the same shape."""
        self._wait(lambda: self._transport.recv([x], source, 0))
        return x

    def abort(self) -> None:
        """Cancel collectives that will never finish, if the transport can."""
        if self.nccl and hasattr(self._transport, "abort"):
            self._transport.abort()

    def close(self) -> None:
        """Release the transport, whose threads end here: they must not outlive the interpreter."""
        self._transport = None

    def _open(self, store: Store, local: bool) -> Any:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
        if self.nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        if not local:
            return dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        loopback = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        loopback._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        loopback._timeout = timeout
        return dist.ProcessGroupGloo(store, self.rank, self.size, loopback)

    def leak(self) -> None:
        """Never free the transport: a fork has none of its threads, and freeing it would wait for them."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._transport))

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        self._translate_errors(lambda: begin().wait())

    @staticmethod
    def _translate_errors(act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error


def _after_fork() -> None:
    """In a forked child: keep the parent's transports alive."""
    for group in _open_groups:
        group.leak()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Message:
    """An action for another rank, with its values and tensors."""

    action: str
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Channel:
    """One end of a connection between processes; `EOFError` or `OSError`: the other process is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Send a message without waiting until it is read."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
        layouts = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        }
        header = json.dumps([message.action, dict(message.values), layouts]).encode()
        self.connection.sendall(
            b"".join([struct.pack("<Q", len(header)), header, *map(_tensor_bytes, tensors.values())])
        )

    def receive(self) -> Message:
        """Wait for a message."""
        prefix = bytearray(8)
        self._fill(memoryview(prefix))
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise EOFError(f"{length} bytes announced: not a message")
        header = bytearray(length)
        self._fill(memoryview(header))
        action, values, layouts = json.loads(header)
        tensors = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in layouts.items()}
        for tensor in tensors.values():
            self._fill(_tensor_bytes(tensor))
        return Message(action, values, tensors)

    def close(self) -> None:
        """Close the connection: the other end reads EOF."""
        self.connection.close()

    def _fill(self, view: memoryview) -> None:
        """Receive exactly as many bytes as the view has."""
        while view:
            received = self.connection.recv_into(view)
            if received == 0:
                raise EOFError("the other process closed the connection")
            view = view[received:]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data
