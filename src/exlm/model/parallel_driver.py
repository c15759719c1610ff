"""Rank 0 of a model in several processes: load it, then keep the workers in step.

`DriverDecoder` sends each batch to the workers before it runs it, and each LoRA's shards;
`WorkerCacheReplicator` repeats on the workers what is done to caches. Callers (`forward`, the runner, the
generator) use both as they use a model in one process.
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
from .parallel_worker import REPLICATED_CACHES, run_worker
from .placement import DeviceCapacity, format_bytes
from .strategies import STRATEGIES, ParallelStrategy, RoleShard

RoleShardFn = Callable[[str, int], RoleShard | None]
"""(role, rank) → the rank's shard of the role's matrix, None if it has none."""


def load_parallel(
    strategy: str,
    config: Config,
    device_infos: Sequence[DeviceInfo],
    gpu_split: Sequence[float] | None,
    progress: LoadProgress,
) -> LoadSteps:
    """Load a shard in each of several processes, which this one starts unless torchrun did.

    Under torchrun every rank calls this and only rank 0 returns: the others become workers, then exit.
    """
    frozen = config.freeze()
    if (rank_info := torchrun_rank()) is not None:
        return (
            yield from _load_under_torchrun(STRATEGIES[strategy], frozen, rank_info, device_infos, progress)
        )
    devices, capacities = rank_devices(device_infos, gpu_split)
    STRATEGIES[strategy].check(frozen, len(devices))
    if len({info.device.type for info in devices}) > 1:
        names = ", ".join(info.name for info in devices)
        raise Unsupported(f"Ranks must be all on GPUs or all on CPUs, found {names}: change config.device.")
    if capacities:
        _check_rank_memory(frozen, device_infos, capacities)
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
    """Each rank's device, and its capacity if `gpu_split` is given.

    The devices are all, or those that `gpu_split` gives more than 0. On a CPU, `gpu_split` makes as many
    ranks as it has entries.
    """
    if not gpu_split:
        return list(device_infos), []
    check_gpu_split(gpu_split)
    if len(device_infos) == 1 and device_infos[0].device.type == "cpu":
        device_infos = [device_infos[0]] * len(gpu_split)
    capacities = split_capacities(device_infos, gpu_split)
    ranks = [
        (device_info, capacity)
        for device_info, gb, capacity in zip(device_infos, gpu_split, capacities, strict=False)
        if gb
    ]
    return [device_info for device_info, _ in ranks], [capacity for _, capacity in ranks]


@contextmanager
def _spawned_workers(
    strategy: str, config: Config, devices: Sequence[DeviceInfo]
) -> Iterator[tuple[RankDriver, Store]]:
    """Start the workers, which load their shards; stop them if the block fails."""
    count = len(devices)
    options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name in ("device", "dtype"):  # may be torch objects, which JSON cannot hold
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
    """`load_parallel` among processes that torchrun started."""
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
    if rank_info.store.check(["driver_address"]):
        raise Unsupported(
            "torchrun's processes serve one model: load others with model.load(), or start without torchrun."
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
    """Connect rank 0's shard with the workers', once every rank has loaded its own."""
    driver.receive_all()
    driver.send_all(Message("open_group"))
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
    """Raise `DoesNotFit` if `gpu_split` gives a rank less than its shard needs."""
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
    """Repeats on the workers what is done to caches, which messages name by id."""

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self._cache_ids: weakref.WeakKeyDictionary[CacheBase | CacheLayer, int] = weakref.WeakKeyDictionary()
        self._last_id = 0
        self._dropped: deque[int] = deque()  # ids of collected caches: finalizers must not send

    def cache_id(self, layers: Sequence[LayerKVCache]) -> int | None:
        """The id of the cache that has these layers; None without a cache."""
        first = layers[0]
        return self._id_of(first) if isinstance(first, CacheLayer) else None

    def replicate_allocation(self, cache: CacheBase) -> None:
        """Register a cache; the workers allocate their shards of it."""
        if type(cache) not in REPLICATED_CACHES.values():
            known = ", ".join(REPLICATED_CACHES)
            raise Unsupported(f"Other processes cannot make a {type(cache).__name__}: use one of {known}.")
        values = {
            "cache_class": type(cache).__name__,
            "batch_size": cache.batch_size,
            "max_seq_len": cache.max_seq_len,
            "dtype": str(cache.dtype).removeprefix("torch."),
        }
        self._send_all("allocate_cache", self._register(cache), values)

    def replicate_clone(self, cache: CacheBase, twin: CacheBase) -> None:
        """The workers clone theirs."""
        self._send_all("clone_cache", self._register(twin), {"source_id": self._id_of(cache)})

    def replicate_call(
        self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None
    ) -> None:
        """The workers call the same method."""
        other = None if target is None else self._id_of(target)
        self._send_all(
            "call_cache", self._id_of(cache), {"method": method, "values": values, "target_id": other}
        )

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
        self.driver.send_all(
            Message(action, {"cache_id": cache_id, "dropped": self.take_dropped(), **values})
        )

    def take_dropped(self) -> list[int]:
        """Ids of caches that were garbage collected since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class DriverDecoder(Decoder):
    """Rank 0's decoder: the workers run every batch with it."""

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
        """Run the batch on every rank; the logits are complete on this one."""
        message = encode_batch(
            batch, self.cache_replicator.cache_id(layers), self.cache_replicator.take_dropped()
        )
        return self.cache_replicator.driver.run_on_all_ranks(
            message, lambda: self.inner.forward(batch, layers)
        )

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Install or remove a LoRA on every rank that has a shard of the module."""
        if not isinstance(change, InstallLora | RemoveLora):
            raise TypeError(f"other processes cannot receive {change!r}")
        driver = self.cache_replicator.driver
        if isinstance(change, RemoveLora) and driver.lost_reason is not None:
            return  # the workers are gone, and their LoRAs with them
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
    """A batch as a message, without what only the embedding reads."""
    tensors = {name: getattr(batch, name) for name in ("ids", "positions", "past_lens", "pages", "mask")}
    return Message(
        "forward",
        {
            "cache_id": cache_id,
            "dropped": dropped,
            "max_kv_len": batch.max_kv_len,
            "uniform": batch.uniform,
            "outputs": batch.outputs,
            "adapters": batch.adapters,
        },
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def shard_change(change: ModuleChange, role_shard: RoleShard) -> ModuleChange:
    """A change for one rank: its shard of the LoRA, under the role's name there."""
    if isinstance(change, InstallLora) and role_shard.cut is not None:
        change = replace(change, weights=change.weights.shard(*role_shard.cut))
    return replace(change, role=role_shard.role)


def encode_change(change: ModuleChange) -> Message:
    """A change as a message."""
    values = {"dropped": [], "adapter_id": change.adapter_id, "role": change.role}
    if isinstance(change, RemoveLora):
        return Message("remove_lora", values)
    return Message("install_lora", values, change.weights._asdict())
