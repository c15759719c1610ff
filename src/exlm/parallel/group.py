"""Ranks that add, gather and hand on tensors together: torch.distributed's groups, no global state."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..errors import Unsupported

T = TypeVar("T")

SECONDS = 300
"""How long a rank waits for the others to arrive at the same step."""


_SEATS: weakref.WeakSet[Group] = weakref.WeakSet()


class GroupBroken(RuntimeError):
    """A step that all ranks take together could not be taken; the message is the transport's."""


class Group:
    """One rank's seat: NCCL between GPUs, gloo between CPUs (and where NCCL is missing)."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, local: bool) -> None:
        """Meet the other ranks at `store`; `local` says that all of them are on this machine."""
        self.rank, self.size, self.device = rank, size, device
        if not dist.is_available():
            raise Unsupported("This build of torch cannot work in several processes: install another one.")
        self.nccl = device.type == "cuda" and dist.is_nccl_available()
        self._ranks: Any = self._safely(lambda: self._meet(store, local))
        _SEATS.add(self)
        self.sum(torch.zeros(1, device=device))  # everybody is here, and the store is not needed again

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each, perhaps in place of x; gloo adds in float32."""
        total = x.contiguous() if self.nccl else x.float().contiguous()
        self._wait(lambda: self._ranks.allreduce([total]))
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, written over everybody else's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(lambda: self._ranks.broadcast([x], options))
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 every rank's tensor, all of one shape; elsewhere nothing."""
        options = dist.GatherOptions()
        options.rootRank = 0
        out = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(lambda: self._ranks.gather([out] if out else [], [x.contiguous()], options))
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Give a tensor to one rank, which receives it."""
        self._wait(lambda: self._ranks.send([x.contiguous()], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What one rank sends, written over a tensor of the same shape."""
        self._wait(lambda: self._ranks.recv([x], source, 0))
        return x

    def abort(self) -> None:
        """Let go of steps that will never be finished, where the transport can."""
        if self.nccl and hasattr(self._ranks, "abort"):
            self._ranks.abort()

    def close(self) -> None:
        """Leave. The transport's threads end here: they must not outlive the interpreter."""
        self._ranks = None

    def _meet(self, store: Store, local: bool) -> Any:
        patience = timedelta(seconds=SECONDS)
        if self.nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        if not local:
            return dist.ProcessGroupGloo(store, self.rank, self.size, patience)
        own = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        own._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        own._timeout = patience
        return dist.ProcessGroupGloo(store, self.rank, self.size, own)

    def keep(self) -> None:
        """Never let go of the transport: in a fork it has no threads, and would wait for them to end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._ranks))

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        self._safely(lambda: begin().wait())

    @staticmethod
    def _safely(act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error


def _forked() -> None:
    """What a process does that was forked from one with groups."""
    for seat in _SEATS:
        seat.keep()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
