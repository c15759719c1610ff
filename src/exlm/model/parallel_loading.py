"""One model in several processes, as rank 0 sees it: who takes part, and one decoder of all their parts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..config import Config, FrozenConfig
from ..errors import DoesNotFit, Unsupported
from ..parallel import Group, Message, RankDriver
from ..parallel.launch import (
    RankInfo,
    accept_workers,
    connect_to_driver,
    file_store,
    start_workers,
    torchrun_rank,
)
from .devices import DeviceInfo
from .instance import ModelInstance, ProgressGenerator, load_steps, open_checkpoint
from .memory import SPLIT_REMEDY, check_gpu_split, compute_profile, estimate_modules, split_capacities
from .parallel_driver import DriverDecoder, WorkerCacheReplicator
from .parallel_worker import run_worker
from .placement import DeviceCapacity, format_bytes
from .progress import ProgressCallback
from .strategies import STRATEGIES, ParallelStrategy


def load_parallel_steps(
    strategy: str,
    config: Config,
    device_infos: Sequence[DeviceInfo],
    gpu_split: Sequence[float] | None,
    callback: ProgressCallback,
    callback_gen: ProgressGenerator | None,
) -> Generator[Any, None, ModelInstance]:
    """Load a part of the model in each of several processes, started here unless torchrun did.

    Under torchrun every rank calls this, and only rank 0 returns: the others serve it, then end the process.
    """
    frozen = config.freeze()
    if (rank_info := torchrun_rank()) is not None:
        return (
            yield from _load_under_torchrun(
                STRATEGIES[strategy], frozen, rank_info, device_infos, callback, callback_gen
            )
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
        single = yield from load_steps(frozen, open_checkpoint(frozen), modules, callback, callback_gen)
        return replace(single, num_ranks=1)
    with _spawned_workers(strategy, config, devices) as (driver, store):
        loaded = yield from STRATEGIES[strategy].load(
            frozen, 0, len(devices), devices[0], callback, callback_gen
        )
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
    callback: ProgressCallback,
    callback_gen: ProgressGenerator | None,
) -> Generator[Any, None, ModelInstance]:
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
        loaded = yield from strategy.load(frozen, 0, rank_info.size, own_device, callback, callback_gen)
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
