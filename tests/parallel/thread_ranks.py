"""Ranks as threads of one process: a group whose collectives meet at a barrier, in plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exlm.config import FrozenConfig
from exlm.kvcache import NoCache
from exlm.model.devices import DeviceInfo
from exlm.model.loader import LoadedModel, LoadProgress, run_to_end
from exlm.model.strategies import TensorParallel
from exlm.nn import Batch

CPU = torch.device("cpu")


@dataclass
class ExchangeBarrier:
    """Where the threads of one group exchange tensors."""

    size: int
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """All ranks' tensors, in order of rank."""
        self.tensors[rank] = x
        self.barrier.wait()
        out = [self.tensors[r] for r in range(self.size)]
        self.barrier.wait()
        return out


@dataclass
class ThreadGroup:
    """A `Group` for one thread."""

    exchange_barrier: ExchangeBarrier
    rank: int
    device: torch.device = CPU

    @property
    def size(self) -> int:
        return self.exchange_barrier.size

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange_barrier.exchange(self.rank, x)).sum(0)

    def broadcast(self, x: Tensor) -> Tensor:
        return self.exchange_barrier.exchange(self.rank, x)[0].clone()

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self.exchange_barrier.exchange(self.rank, x)
        return parts if self.rank == 0 else []


def run_on_each_rank(size: int, act: Callable[[int], Any]) -> list[Any]:
    """Run `act` in a thread for each rank; return the results or raise the first error."""
    out: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                out[rank] = act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out


def load_shards(config: FrozenConfig, size: int) -> list[LoadedModel]:
    """All ranks' shards of a model, connected by one barrier."""
    exchange_barrier, device_info, out = ExchangeBarrier(size), DeviceInfo("cpu", CPU, 0), []
    for rank in range(size):
        loaded = run_to_end(TensorParallel(config, size).load(rank, device_info, LoadProgress()))
        TensorParallel(config, size).connect(loaded, ThreadGroup(exchange_barrier, rank))  # type: ignore[arg-type]
        out.append(loaded)
    return out


def rank0_logits(ranks: list[LoadedModel], ids: Tensor, adapters: Any = ()) -> Tensor:
    """The logits on rank 0."""
    rows, tokens = ids.shape
    positions = torch.arange(tokens).expand(rows, tokens)
    past_lens = torch.zeros(rows, dtype=torch.int64)
    pages = torch.zeros(rows, 1, dtype=torch.int64)
    batch = Batch(
        ids=ids,
        positions=positions,
        past_lens=past_lens,
        page_table=pages,
        max_kv_len=tokens,
        uniform=True,
        adapters=adapters,
    )
    logits = run_on_each_rank(
        len(ranks), lambda r: ranks[r].decoder.forward(batch, [NoCache()] * len(ranks[r].layer_shapes))[0]
    )
    assert isinstance(logits[0], Tensor)
    return logits[0]
