"""What keeps the ranks of one model in step.

On rank 0 a `Led` decoder tells the followers of each pass before it takes it and hands them their parts of
adapters; a `Mirrored` tells them what is done to caches. Everything above, `forward`, a runner, a generator,
works as with a model in one process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, Unsupported
from ..kernels.interface import LayerKVCache
from ..kvcache import Cache, CacheBase, CacheFP8, CacheFP16, CacheLayer, CacheQ4, CacheQ6, CacheQ8
from ..lora import InstallLora, RemoveLora
from ..nn import Batch, LoraRef
from ..parallel import Message, RankDriver
from . import lora_shards as adapting
from .decoder import Decoder
from .lora_shards import RoleShard, shard_change

RoleShardFn = Callable[[str, int], RoleShard | None]
"""Role and rank → what the rank has of it."""

CACHE_CLASSES: dict[str, type[CacheBase]] = {
    kind.__name__: kind for kind in (Cache, CacheFP16, CacheQ8, CacheQ6, CacheQ4, CacheFP8)
}


class WorkerCacheReplicator:
    """The numbers by which followers know caches and their layers."""

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self._cache_ids: weakref.WeakKeyDictionary[CacheBase | CacheLayer, int] = weakref.WeakKeyDictionary()
        self._last_id = 0
        self._dropped: deque[int] = deque()  # by the garbage collector, at a moment when nobody may be told

    def cache_id(self, layers: Sequence[LayerKVCache]) -> int | None:
        """Which cache has these layers; None: there is no cache."""
        first = layers[0]
        return self._id_of(first) if isinstance(first, CacheLayer) else None

    def replicate_allocation(self, cache: CacheBase) -> None:
        """Give it a number; the followers make their own parts."""
        if type(cache) not in CACHE_CLASSES.values():
            known = ", ".join(CACHE_CLASSES)
            raise Unsupported(f"Other processes cannot make a {type(cache).__name__}: use one of {known}.")
        values = {
            "kind": type(cache).__name__,
            "batch_size": cache.batch_size,
            "max_seq_len": cache.max_seq_len,
            "dtype": str(cache.dtype).removeprefix("torch."),
        }
        self._send_all("cache", self._register(cache), values)

    def replicate_clone(self, cache: CacheBase, twin: CacheBase) -> None:
        """The followers clone theirs."""
        self._send_all("clone", self._register(twin), {"of": self._id_of(cache)})

    def replicate_call(
        self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None
    ) -> None:
        """The followers do the same."""
        other = None if target is None else self._id_of(target)
        self._send_all("did", self._id_of(cache), {"what": method, "values": values, "target": other})

    def _id_of(self, one: CacheBase | CacheLayer) -> int:
        if one not in self._cache_ids:
            raise InputError("This cache was made before the model was loaded as it is now: make a new one.")
        return self._cache_ids[one]

    def _register(self, cache: CacheBase) -> int:
        self._last_id += 1
        self._cache_ids[cache] = self._last_id
        for layer in cache.layers:
            self._cache_ids[layer] = self._last_id
        weakref.finalize(cache, self._dropped.append, self._last_id)
        return self._last_id

    def _send_all(self, action: str, cache_id: int, values: dict[str, object]) -> None:
        self.driver.send_all(Message(action, {"number": cache_id, "dropped": self.take_dropped(), **values}))

    def take_dropped(self) -> list[int]:
        """Caches that are no longer needed, to be told once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class DriverDecoder(Decoder):
    """Rank 0's decoder: the others take every pass with it."""

    def __init__(
        self,
        decoder: Decoder,
        cache_replicator: WorkerCacheReplicator,
        role_shard: RoleShardFn,
        device: torch.device,
    ) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.transfers)
        self.inner, self.cache_replicator, self.role_shard, self.device = (
            decoder,
            cache_replicator,
            role_shard,
            device,
        )

    def forward(self, batch: Batch, layers: Sequence[LayerKVCache]) -> tuple[Tensor | None, Tensor]:
        """The pass, on every rank; the answer is complete on this one."""
        message = encode_batch(
            batch, self.cache_replicator.cache_id(layers), self.cache_replicator.take_dropped()
        )
        return self.cache_replicator.driver.run_on_all_ranks(
            message, lambda: self.inner.forward(batch, layers)
        )

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """An adapter goes in or out, on every rank that has a part of the module."""
        if not isinstance(change, InstallLora | RemoveLora):
            raise TypeError(f"other processes cannot be handed {change!r}")
        driver = self.cache_replicator.driver
        if isinstance(change, RemoveLora) and driver.lost_reason is not None:
            return  # and everything with it
        for rank in range(len(driver.channels) + 1):
            shard = self.role_shard(change.role, rank)
            if shard is None:
                continue
            rank_change = shard_change(change, shard)
            if rank > 0:
                driver.send(rank, adapting.encode_change(rank_change))
            else:
                self.inner.replace(rank_change.module_role, rank_change.to(self.device))


def encode_batch(batch: Batch, cache_id: int | None, dropped: list[int]) -> Message:
    """A batch as an order: all of it but what only the embedding reads."""
    tensors = {name: getattr(batch, name) for name in ("ids", "positions", "past_lens", "pages", "mask")}
    return Message(
        "forward",
        {
            "number": cache_id,
            "dropped": dropped,
            "max_kv_len": batch.max_kv_len,
            "uniform": batch.uniform,
            "outputs": batch.outputs,
            "adapters": batch.adapters,
        },
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def decode_batch(message: Message, device: torch.device) -> Batch:
    """The batch of an order, on a device."""
    fields: dict[str, Any] = {name: tensor.to(device) for name, tensor in message.tensors.items()}
    fields |= {name: message.values[name] for name in ("max_kv_len", "uniform", "outputs")}
    adapters = tuple(tuple(LoraRef(*one) for one in row) for row in message.values["adapters"])
    return Batch(**fields, adapters=adapters)
