"""A worker (rank 1 and up): load its shard, then handle rank 0's messages until the channel closes."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from .. import spec
from ..config import Config, FrozenConfig
from ..kvcache import CACHES, Cache, CacheBase, NoCache
from ..lora import InstallLora, LoraWeights, ModuleChange, RemoveLora
from ..nn import Batch, LoraRef
from ..parallel import Channel, Group, Message
from ..parallel.launch import file_store
from .devices import DeviceInfo, list_devices
from .instance import LoadProgress, ModelInstance, run_to_end
from .memory import CacheOwnerInfo
from .strategies import STRATEGIES, ParallelStrategy

log = logging.getLogger(__name__)

REPLICATED_METHODS = ("copy", "copy_states", "roll_left")
"""Methods of a cache that rank 0 calls on every rank."""

_CACHE_CLASSES: list[type[CacheBase]] = [Cache, *CACHES.values()]

REPLICATED_CACHES = {cache_class.__name__: cache_class for cache_class in _CACHE_CLASSES}
"""The caches that rank 0 can have the workers allocate, by class name."""


def main(task: Mapping[str, Any]) -> None:
    """Entry point of a process that rank 0 started."""
    rank, size = task["rank"], task["size"]
    with (
        socket.socket(fileno=task["channel_fd"]) as connection,
        _report_failure(channel := Channel(connection), rank),
    ):
        torch.set_num_threads(task["threads"])
        config = Config(task["config"]["model_dir"])
        for name, value in task["config"].items():
            setattr(config, name, value)
        store = file_store(task["store"], size)
        device_info, strategy = list_devices(task["device"])[0], STRATEGIES[task["strategy"]]
        run_worker(channel, strategy, config.freeze(), rank, size, device_info, store, local=True)


def run_worker(
    channel: Channel,
    strategy: ParallelStrategy,
    config: FrozenConfig,
    rank: int,
    size: int,
    device_info: DeviceInfo,
    store: Store,
    *,
    local: bool,
) -> None:
    """Load the shard, open the process group, run the worker loop; rank 0 gets a failure's message."""
    with _report_failure(channel, rank):
        if device_info.device.type == "cuda":
            torch.cuda.set_device(device_info.device)
        loaded = run_to_end(strategy.load(config, rank, size, device_info, LoadProgress()))
        channel.send(Message("loaded"))
        if channel.receive().action != "open_group":
            return
        group = Group(store, rank, size, device_info.device, local)
        loaded = replace(loaded, decoder=strategy.connect(loaded, config, group))
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


def worker_loop(channel: Channel, loaded: ModelInstance, device: torch.device) -> None:
    """Run every batch that rank 0 runs, and repeat what it does to caches and LoRAs."""
    model = CacheOwnerInfo(
        loaded.layer_shapes, loaded.module_backends[0].dtype, [device] * len(loaded.layer_shapes)
    )
    caches: dict[int, CacheBase] = {}
    while (message := channel.receive()).action != "stop":
        values = message.values
        for cache_id in values["dropped"]:
            caches.pop(cache_id, None)
        match message.action:
            case "forward":
                cache_id = values["cache_id"]
                layers = (
                    [NoCache()] * len(loaded.layer_shapes) if cache_id is None else caches[cache_id].layers
                )
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


def decode_change(message: Message, model: spec.Model, device: torch.device) -> ModuleChange:
    """The change in a message, for the shard that `model` describes."""
    adapter_id, role = message.values["adapter_id"], message.values["role"]
    if message.action == "remove_lora":
        return RemoveLora(adapter_id, role)
    return InstallLora.for_model(model, adapter_id, role, LoraWeights(**message.tensors)).to(device)


def decode_batch(message: Message, device: torch.device) -> Batch:
    """The batch in a message, on a device."""
    fields: dict[str, Any] = {name: tensor.to(device) for name, tensor in message.tensors.items()}
    fields |= {name: message.values[name] for name in ("max_kv_len", "uniform", "outputs")}
    adapters = tuple(tuple(LoraRef(*one) for one in row) for row in message.values["adapters"])
    return Batch(**fields, adapters=adapters)
