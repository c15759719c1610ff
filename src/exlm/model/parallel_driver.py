"""What keeps the ranks of one model in step.

On rank 0 a `Led` decoder tells the followers of each pass before it takes it and hands them their parts of
adapters; a `Mirrored` tells them what is done to caches. Everything above, `forward`, a runner, a generator,
works as with a model in one process.
"""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..config import Config, FrozenConfig
from ..errors import DoesNotFit, InputError, Unsupported
from ..kernels.interface import LayerKVCache
from ..kvcache import CacheBase, CacheLayer
from ..kvcache.registry import CACHE_CLASSES
from ..lora import InstallLora, ModuleChange, RemoveLora
from ..nn import Batch
from ..parallel import Group, Message, RankDriver
from ..parallel.launch import (
    RankInfo,
    accept_workers,
    connect_to_driver,
    file_store,
    start_workers,
    torchrun_rank,
)
from .decoder import Decoder
from .devices import DeviceInfo
from .instance import LoadProgress, LoadSteps, ModelInstance, load_modules, open_checkpoint
from .memory import SPLIT_REMEDY, check_gpu_split, compute_profile, estimate_modules, split_capacities
from .parallel_worker import run_worker
from .placement import DeviceCapacity, format_bytes
from .strategies import STRATEGIES, ParallelStrategy, RoleShard

RoleShardFn = Callable[[str, int], RoleShard | None]
"""Role and rank → what the rank has of it."""


def load_parallel(
    strategy: str,
    config: Config,
    device_infos: Sequence[DeviceInfo],
    gpu_split: Sequence[float] | None,
    progress: LoadProgress,
) -> LoadSteps:
    """Load a part of the model in each of several processes, started here unless torchrun did.

    Under torchrun every rank calls this, and only rank 0 returns: the others serve it, then end the process.
    """
    frozen = config.freeze()
    if (rank_info := torchrun_rank()) is not None:
        return (
            yield from _load_under_torchrun(STRATEGIES[strategy], frozen, rank_info, device_infos, progress)
        )
    devices, spaces = rank_devices(device_infos, gpu_split)
    STRATEGIES[strategy].check(frozen, len(devices))
    if len({rank_info.device.type for rank_info in devices}) > 1:
        names = ", ".join(rank_info.name for rank_info in devices)
        raise Unsupported(f"Ranks must be all on GPUs or all on CPUs, found {names}: change config.device.")
    if spaces:
        _check_rank_memory(frozen, device_infos, spaces)
    if len(devices) == 1:
        modules = [devices[0]] * (len(frozen.spec.layers) + 2)
        single = yield from load_modules(frozen, open_checkpoint(frozen), modules, progress)
        return replace(single, num_ranks=1)
    with _spawned_workers(strategy, config, devices) as (driver, store):
        loaded = yield from STRATEGIES[strategy].load(frozen, 0, len(devices), devices[0], progress)
        return _connect_ranks(STRATEGIES[strategy], frozen, loaded, driver, store, len(devices), local=True)


def rank_devices(
    device_infos: Sequence[DeviceInfo], gpu_split: Sequence[float] | None
) -> tuple[list[DeviceInfo], list[DeviceCapacity]]:
    """One device for each rank, and how much of each may be used; no such limits where there is no split.

    The devices are all there are, or those that a split gives more than nothing. Where there is only the CPU,
    a split makes that many ranks of it.
    """
    if not gpu_split:
        return list(device_infos), []
    check_gpu_split(gpu_split)
    if len(device_infos) == 1 and device_infos[0].device.type == "cpu":
        device_infos = [device_infos[0]] * len(gpu_split)
    spaces = split_capacities(device_infos, gpu_split)
    ranks = [
        (device_info, space)
        for device_info, gb, space in zip(device_infos, gpu_split, spaces, strict=False)
        if gb
    ]
    return [device_info for device_info, _ in ranks], [space for _, space in ranks]


@contextmanager
def _spawned_workers(
    strategy: str, config: Config, devices: Sequence[DeviceInfo]
) -> Iterator[tuple[RankDriver, Store]]:
    """Every other rank's process, at work on its share; none is left if the block fails."""
    count = len(devices)
    options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name in ("device", "dtype"):  # perhaps torch's own objects, whose names say the same
        options[name] = None if options[name] is None else str(options[name])
    with tempfile.TemporaryDirectory(prefix="exlm-") as folder:
        store_path = str(Path(folder) / "ranks")
        task = {
            "strategy": strategy,
            "config": options,
            "size": count,
            "store": store_path,
            "threads": max(1, torch.get_num_threads() // count),
        }
        tasks = [{**task, "rank": r, "device": str(devices[r].device)} for r in range(1, count)]
        driver = RankDriver(*start_workers("exlm.model.parallel_worker", tasks))
        try:
            yield driver, file_store(store_path, count)
        except BaseException as error:
            driver.fail(f"loading failed on rank 0 with {type(error).__name__}")
            raise


def _load_under_torchrun(
    strategy: ParallelStrategy,
    frozen: FrozenConfig,
    rank_info: RankInfo,
    device_infos: Sequence[DeviceInfo],
    progress: LoadProgress,
) -> LoadSteps:
    """The same among processes that torchrun started."""
    strategy.check(frozen, rank_info.size)
    own_device = device_infos[dist.get_node_local_rank(0) % len(device_infos)]
    if rank_info.rank:
        channel = connect_to_driver(rank_info)
        run_worker(
            channel,
            strategy,
            frozen,
            rank_info.rank,
            rank_info.size,
            own_device,
            rank_info.store,
            local=False,
        )
        channel.close()
        sys.exit(0)
    if rank_info.store.check(["line"]):
        raise Unsupported(
            "torchrun's processes follow one model: load others with model.load(), or start without torchrun."
        )
    driver = RankDriver(accept_workers(rank_info))
    try:
        loaded = yield from strategy.load(frozen, 0, rank_info.size, own_device, progress)
        return _connect_ranks(strategy, frozen, loaded, driver, rank_info.store, rank_info.size, local=False)
    except BaseException:
        driver.close()
        raise


def _connect_ranks(
    strategy: ParallelStrategy,
    frozen: FrozenConfig,
    share: ModelInstance,
    driver: RankDriver,
    store: Store,
    count: int,
    *,
    local: bool,
) -> ModelInstance:
    """Rank 0's share made the head of the whole, once every rank has loaded its own."""
    driver.receive_all()
    driver.send_all(Message("meet"))
    group = driver.open_group(lambda: Group(store, 0, count, share.devices[0], local))
    cache_replicator = WorkerCacheReplicator(driver)
    role_shard = partial(strategy.role_shard, frozen, size=count)
    decoder = DriverDecoder(
        strategy.connect(share, frozen, group), cache_replicator, role_shard, group.device
    )
    return replace(
        share,
        decoder=decoder,
        num_ranks=count,
        driver=driver,
        cache_replicator=cache_replicator,
        full_spec=frozen.spec,
    )


def _check_rank_memory(
    frozen: FrozenConfig, device_infos: Sequence[DeviceInfo], capacities: Sequence[DeviceCapacity]
) -> None:
    """Refuse a split whose numbers are below what a rank's share takes."""
    parts = estimate_modules(
        frozen, open_checkpoint(frozen), compute_profile(frozen, device_infos), [0] * len(frozen.spec.layers)
    )
    share = sum(part.weights + part.shared for part in parts[1:]) // len(capacities)
    for rank, capacity in enumerate(capacities):
        need = share + (parts[0].weights if rank == 0 else 0)
        if need > capacity.free:
            raise DoesNotFit(
                f"Rank {rank}'s share of the weights takes {format_bytes(need)}, but gpu_split gives "
                f"{capacity.name} {format_bytes(capacity.free)}. {SPLIT_REMEDY}"
            )


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
                driver.send(rank, encode_change(rank_change))
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


def shard_change(change: ModuleChange, role_shard: RoleShard) -> ModuleChange:
    """What a change means to a rank."""
    if isinstance(change, InstallLora) and role_shard.cut is not None:
        change = replace(change, weights=change.weights.shard(*role_shard.cut))
    return replace(change, role=role_shard.role)


def encode_change(change: ModuleChange) -> Message:
    """A change as an order."""
    values = {"dropped": [], "number": change.adapter_id, "role": change.role}
    if isinstance(change, RemoveLora):
        return Message("restore", values)
    return Message("adapt", values, change.weights._asdict())
