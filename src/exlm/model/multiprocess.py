"""A model in several processes: rank 0, which callers use like a model in one process, and its workers.

`load_parallel` loads a shard in each process. `DriverDecoder` sends each batch and each LoRA's shards to
the workers before rank 0 runs them; `WorkerCacheReplicator` repeats on the workers what is done to caches.
A worker (rank 1 and up) loads its shard, then handles rank 0's messages until the channel closes.
"""

from __future__ import annotations

import logging
import socket
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from .. import spec
from ..config import Config, FrozenConfig
from ..errors import DoesNotFit, InputError, Unsupported
from ..kernels.interface import LayerKVCache
from ..kvcache import CACHES, Cache, CacheBase, CacheLayer, NoCache
from ..lora import InstallLora, LoraWeights, ModuleChange, RemoveLora
from ..nn import Batch, LoraRef
from ..parallel import Channel, Group, Message, RankDriver
from ..parallel.workers import RankInfo, accept_workers, connect_to_driver, file_store, start_workers, torchrun_rank
from .decoder import Decoder
from .devices import DeviceInfo, list_devices
from .loader import CacheOwnerInfo, LoadedModel, LoadProgress, LoadSteps, load_modules, run_to_end
from .placement import (
    SPLIT_REMEDY,
    DeviceBudget,
    check_gpu_split,
    compute_profile,
    estimate_modules,
    format_bytes,
    split_budgets,
)
from .strategies import STRATEGIES, ParallelStrategy, RoleShard

log = logging.getLogger(__name__)

REPLICATED_METHODS = ("copy", "copy_states", "roll_left")
"""Methods of a cache that rank 0 calls on every rank."""

_CACHE_CLASSES: list[type[CacheBase]] = [Cache, *CACHES.values()]

REPLICATED_CACHES = {cache_class.__name__: cache_class for cache_class in _CACHE_CLASSES}
"""The caches that rank 0 can have the workers allocate, by class name."""

RoleShardFn = Callable[[str, int], RoleShard | None]
"""(role, rank) → the rank's shard of the role's matrix, None if it has none."""


def load_parallel(
    name: str,
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
        strategy = STRATEGIES[name](frozen, rank_info.size)
        return (yield from _load_under_torchrun(strategy, rank_info, device_infos, progress))
    devices, budgets = rank_devices(device_infos, gpu_split)
    strategy = STRATEGIES[name](frozen, len(devices))
    if len({info.device.type for info in devices}) > 1:
        names = ", ".join(info.name for info in devices)
        raise Unsupported(f"Ranks must be all on GPUs or all on CPUs, found {names}: change config.device.")
    if budgets:
        _check_rank_memory(frozen, device_infos, budgets)
    if len(devices) == 1:
        modules = [devices[0]] * (len(frozen.spec.layers) + 2)
        single = yield from load_modules(frozen, frozen.open_checkpoint(), modules, progress)
        return replace(single, num_ranks=1)
    with _spawned_workers(name, config, devices) as (driver, store):
        loaded = yield from strategy.load(0, devices[0], progress)
        return _connect_ranks(strategy, loaded, driver, store, local=True)


def rank_devices(
    device_infos: Sequence[DeviceInfo], gpu_split: Sequence[float] | None
) -> tuple[list[DeviceInfo], list[DeviceBudget]]:
    """Each rank's device, and its usable memory if `gpu_split` is given.

    The devices are all, or those that `gpu_split` gives more than 0. On a CPU, `gpu_split` makes as many
    ranks as it has entries.
    """
    if not gpu_split:
        return list(device_infos), []
    check_gpu_split(gpu_split)
    if len(device_infos) == 1 and device_infos[0].device.type == "cpu":
        device_infos = [device_infos[0]] * len(gpu_split)
    budgets = split_budgets(device_infos, gpu_split)
    chosen = [i for i, gb in enumerate(gpu_split[: len(budgets)]) if gb]
    return [device_infos[i] for i in chosen], [budgets[i] for i in chosen]


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
        driver = RankDriver(*start_workers(__name__, tasks))
        try:
            yield driver, file_store(store_path, count)
        except BaseException as error:
            driver.fail(f"loading failed on rank 0 with {type(error).__name__}")
            raise


def _load_under_torchrun(
    strategy: ParallelStrategy,
    rank_info: RankInfo,
    device_infos: Sequence[DeviceInfo],
    progress: LoadProgress,
) -> LoadSteps:
    """`load_parallel` among processes that torchrun started."""
    own_device = device_infos[dist.get_node_local_rank(0) % len(device_infos)]
    if rank_info.rank:
        channel = connect_to_driver(rank_info)
        run_worker(channel, strategy, rank_info.rank, own_device, rank_info.store, local=False)
        channel.close()
        sys.exit(0)
    if rank_info.store.check(["driver_address"]):
        raise Unsupported(
            "torchrun's processes serve one model: load others with model.load(), or start without torchrun."
        )
    driver = RankDriver(accept_workers(rank_info))
    try:
        loaded = yield from strategy.load(0, own_device, progress)
        return _connect_ranks(strategy, loaded, driver, rank_info.store, local=False)
    except BaseException:
        driver.close()
        raise


def _connect_ranks(
    strategy: ParallelStrategy, own_shard: LoadedModel, driver: RankDriver, store: Store, *, local: bool
) -> LoadedModel:
    """Connect rank 0's shard with the workers', once every rank has loaded its own."""
    driver.receive_all()
    driver.send_all(Message("open_group"))
    group = driver.open_group(lambda: Group(store, 0, strategy.size, own_shard.device, local))
    cache_replicator = WorkerCacheReplicator(driver)
    connected = strategy.connect(own_shard, group)
    return replace(
        own_shard,
        decoder=DriverDecoder(connected, cache_replicator, strategy.role_shard, group.device),
        num_ranks=strategy.size,
        driver=driver,
        cache_replicator=cache_replicator,
        full_spec=strategy.config.spec,
    )


def _check_rank_memory(
    frozen: FrozenConfig, device_infos: Sequence[DeviceInfo], budgets: Sequence[DeviceBudget]
) -> None:
    """Raise `DoesNotFit` if `gpu_split` gives a rank less memory than its shard needs."""
    modules = estimate_modules(
        frozen, frozen.open_checkpoint(), compute_profile(frozen, device_infos), [0] * len(frozen.spec.layers)
    )
    share = sum(module.weights + module.shared for module in modules[1:]) // len(budgets)
    for rank, budget in enumerate(budgets):
        needed = share + (modules[0].weights if rank == 0 else 0)
        if needed > budget.usable:
            raise DoesNotFit(
                f"Rank {rank}'s share of the weights takes {format_bytes(needed)}, but gpu_split gives "
                f"{budget.name} {format_bytes(budget.usable)}. {SPLIT_REMEDY}"
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

    def replicate_clone(self, cache: CacheBase, clone: CacheBase) -> None:
        self._send_all("clone_cache", self._register(clone), {"source_id": self._id_of(cache)})

    def replicate_call(self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None) -> None:
        """The workers call the same method."""
        target_id = None if target is None else self._id_of(target)
        self._send_all("call_cache", self._id_of(cache), {"method": method, "values": values, "target_id": target_id})

    def _id_of(self, cache: CacheBase | CacheLayer) -> int:
        if cache not in self._cache_ids:
            raise InputError("This cache was made before the model was loaded as it is now: make a new one.")
        return self._cache_ids[cache]

    def _register(self, cache: CacheBase) -> int:
        self._last_id += 1
        self._cache_ids[cache] = self._last_id
        for layer in cache.layers:
            self._cache_ids[layer] = self._last_id
        weakref.finalize(cache, self._dropped.append, self._last_id)
        return self._last_id

    def _send_all(self, action: str, cache_id: int, values: dict[str, object]) -> None:
        self.driver.send_all(Message(action, {"cache_id": cache_id, "dropped": self.take_dropped(), **values}))

    def take_dropped(self) -> list[int]:
        """Ids of caches that were garbage collected since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class DriverDecoder(Decoder):
    """Rank 0's decoder: every rank runs each batch, and gets its shard of each LoRA."""

    def __init__(
        self, decoder: Decoder, cache_replicator: WorkerCacheReplicator, role_shard: RoleShardFn, device: torch.device
    ) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.transfers)
        self.inner, self.cache_replicator = decoder, cache_replicator
        self.role_shard, self.device = role_shard, device

    def forward(self, batch: Batch, layers: Sequence[LayerKVCache]) -> tuple[Tensor | None, Tensor]:
        """Run the batch on every rank; the logits are complete on this one."""
        message = encode_batch(batch, self.cache_replicator.cache_id(layers), self.cache_replicator.take_dropped())
        return self.cache_replicator.driver.run_on_all_ranks(message, lambda: self.inner.forward(batch, layers))

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


def main(task: Mapping[str, Any]) -> None:
    """Entry point of a process that rank 0 started."""
    rank, size = task["rank"], task["size"]
    with socket.socket(fileno=task["channel_fd"]) as connection, _report_failure(channel := Channel(connection), rank):
        torch.set_num_threads(task["threads"])
        config = Config(task["config"]["model_dir"])
        for name, value in task["config"].items():
            setattr(config, name, value)
        store = file_store(task["store"], size)
        strategy = STRATEGIES[task["strategy"]](config.freeze(), size)
        run_worker(channel, strategy, rank, list_devices(task["device"])[0], store, local=True)


def run_worker(
    channel: Channel, strategy: ParallelStrategy, rank: int, device_info: DeviceInfo, store: Store, *, local: bool
) -> None:
    """Load the shard, open the process group, run the worker loop; rank 0 gets a failure's message."""
    with _report_failure(channel, rank):
        if device_info.device.type == "cuda":
            torch.cuda.set_device(device_info.device)
        loaded = run_to_end(strategy.load(rank, device_info, LoadProgress()))
        channel.send(Message("loaded"))
        if channel.receive().action != "open_group":
            return
        group = Group(store, rank, strategy.size, device_info.device, local)
        loaded = replace(loaded, decoder=strategy.connect(loaded, group))
        with torch.no_grad(), closing(group):
            worker_loop(channel, loaded, device_info.device)


@contextmanager
def _report_failure(channel: Channel, rank: int) -> Iterator[None]:
    """Send a failure's message to rank 0 and exit; if rank 0 is gone, only leave the block."""
    try:
        yield
    except (EOFError, ConnectionError):
        log.debug("rank 0 is gone")
    except Exception as error:
        log.debug("rank %d failed", rank, exc_info=True)
        with suppress(OSError):
            channel.send(Message("failed", {"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)


def worker_loop(channel: Channel, loaded: LoadedModel, device: torch.device) -> None:
    """Run every batch that rank 0 runs, and repeat what it does to caches and LoRAs."""
    model = CacheOwnerInfo(loaded.layer_shapes, loaded.dtype, [device] * len(loaded.layer_shapes))
    caches: dict[int, CacheBase] = {}
    while (message := channel.receive()).action != "stop":
        values = message.values
        for cache_id in values["dropped"]:
            caches.pop(cache_id, None)
        match message.action:
            case "forward":
                cache_id = values["cache_id"]
                layers = [NoCache()] * len(loaded.layer_shapes) if cache_id is None else caches[cache_id].layers
                loaded.decoder.forward(decode_batch(message, device), layers)
            case "allocate_cache":
                caches[values["cache_id"]] = _make_cache(model, values)
            case "install_lora" | "remove_lora":
                change = decode_change(message, loaded.config.spec, device)
                loaded.decoder.replace(change.module_role, change)
            case "clone_cache":
                caches[values["cache_id"]] = caches[values["source_id"]].clone()
            case "call_cache" if values["method"] in REPLICATED_METHODS:
                target = () if values["target_id"] is None else (caches[values["target_id"]],)
                getattr(caches[values["cache_id"]], values["method"])(*target, *values["values"])
            case unknown:
                raise ValueError(f"rank 0 sent the unknown action {unknown!r} with {values}")


def _make_cache(model: CacheOwnerInfo, values: Mapping[str, Any]) -> CacheBase:
    cache_class = REPLICATED_CACHES[values["cache_class"]]
    options: dict[str, Any] = {"dtype": values["dtype"]} if cache_class is Cache else {}
    return cache_class(model, values["batch_size"], values["max_seq_len"], **options)


def encode_batch(batch: Batch, cache_id: int | None, dropped: list[int]) -> Message:
    """A batch as a message, without the vector spans, which only rank 0's embedding reads."""
    tensors = {name: getattr(batch, name) for name in ("ids", "positions", "past_lens", "page_table", "mask")}
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


def decode_batch(message: Message, device: torch.device) -> Batch:
    """The batch in a message, on a device."""
    fields: dict[str, Any] = {name: tensor.to(device) for name, tensor in message.tensors.items()}
    fields |= {name: message.values[name] for name in ("max_kv_len", "uniform", "outputs")}
    adapters = tuple(tuple(LoraRef(*one) for one in row) for row in message.values["adapters"])
    return Batch(**fields, adapters=adapters)


def shard_change(change: ModuleChange, shard: RoleShard) -> ModuleChange:
    """A LoRA change for one rank: its shard of the weights, and the role's name on that rank."""
    if isinstance(change, InstallLora) and shard.part is not None:
        change = replace(change, weights=change.weights.shard(*shard.part))
    return replace(change, role=shard.role)


def encode_change(change: ModuleChange) -> Message:
    values = {"dropped": [], "adapter_id": change.adapter_id, "role": change.role}
    if isinstance(change, RemoveLora):
        return Message("remove_lora", values)
    return Message("install_lora", values, change.weights._asdict())


def decode_change(message: Message, model: spec.Model, device: torch.device) -> ModuleChange:
    """The change in a message, for the shard that `model` describes."""
    adapter_id, role = message.values["adapter_id"], message.values["role"]
    if message.action == "remove_lora":
        return RemoveLora(adapter_id, role)
    return InstallLora.for_model(model, adapter_id, role, LoraWeights(**message.tensors)).to(device)
