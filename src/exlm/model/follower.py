"""A rank other than 0: it loads its share, then does what rank 0 orders until the line to it ends."""

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

from ..cache import CacheBase, Passing
from ..config import Config, FrozenConfig
from ..parallel import Channel, Group, Order
from ..parallel.launch import meeting
from . import adapting
from .budget import Planned
from .devices import Slot, inventory
from .led import KINDS, unpack
from .loading import Loaded
from .progress import silent
from .ways import WAYS, Loading, Way

log = logging.getLogger(__name__)

REPEATED = ("copy", "copy_states", "roll_left")
"""What is done to a cache on every rank."""


def main(told: Mapping[str, Any]) -> None:
    """What a process that rank 0 started does, from its first line to its last."""
    rank, size = told["rank"], told["size"]
    with socket.socket(fileno=told["line"]) as line, _told(channel := Channel(line), rank):
        torch.set_num_threads(told["threads"])
        config = Config(told["config"]["model_dir"])
        for name, value in told["config"].items():
            setattr(config, name, value)
        store = meeting(told["store"], size)
        slot, way = inventory(told["device"])[0], WAYS[told["way"]]
        serve(channel, way, config.freeze(), rank, size, slot, store, local=True)


def serve(
    channel: Channel,
    way: Way,
    config: FrozenConfig,
    rank: int,
    size: int,
    slot: Slot,
    store: Store,
    *,
    local: bool,
) -> None:
    """Load, meet the other ranks, follow. A failure is told to rank 0 and ends the process."""
    with _told(channel, rank):
        if slot.device.type == "cuda":
            torch.cuda.set_device(slot.device)
        loaded = last(way.load(config, rank, size, slot, silent, None))
        channel.send(Order("loaded"))
        if channel.receive().do != "meet":
            return
        group = Group(store, rank, size, slot.device, local)
        loaded = replace(loaded, decoder=way.connect(loaded, config, group))
        with torch.no_grad(), closing(group):
            follow(channel, loaded, slot.device)


@contextmanager
def _told(channel: Channel, rank: int) -> Iterator[None]:
    """A failure is told to rank 0 and ends the process; where rank 0 is gone, there is nothing to tell."""
    try:
        yield
    except (EOFError, ConnectionError):
        log.debug("rank 0 is gone")  # and with it the reason to be here
    except Exception as error:
        log.debug("rank %d failed", rank, exc_info=True)
        with suppress(OSError):
            channel.send(Order("failed", {"why": f"{type(error).__name__}: {error}"}))
        sys.exit(1)


def follow(channel: Channel, loaded: Loaded, device: torch.device) -> None:
    """Take every pass that rank 0 takes, and do to the caches what it does."""
    model = Planned(loaded.shapes, loaded.chains[0].dtype, [device] * len(loaded.shapes))
    caches: dict[int, CacheBase] = {}
    while (order := channel.receive()).do != "stop":
        values = order.values
        for number in values["dropped"]:
            caches.pop(number, None)
        match order.do:
            case "forward":
                number = values["number"]
                layers = [Passing()] * len(loaded.shapes) if number is None else caches[number].layers
                loaded.decoder.forward(unpack(order, device), layers)
            case "cache":
                caches[values["number"]] = _cache(model, values)
            case "adapt" | "restore":
                change = adapting.unpack(order, loaded.config.spec, device)
                loaded.decoder.replace(change.module_role, change)
            case "clone":
                caches[values["number"]] = caches[values["of"]].clone()
            case "did" if values["what"] in REPEATED:
                target = () if values["target"] is None else (caches[values["target"]],)
                getattr(caches[values["number"]], values["what"])(*target, *values["values"])
            case unknown:
                raise ValueError(f"rank 0 ordered {unknown!r} with {values}, which is not known here")


def _cache(model: Planned, values: Mapping[str, Any]) -> CacheBase:
    kind, options = KINDS[values["kind"]], {}
    if kind is KINDS["Cache"]:
        options["dtype"] = values["dtype"]
    return kind(model, values["batch_size"], values["max_seq_len"], **options)


def last(steps: Loading) -> Loaded:
    """What the steps of a load return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            loaded: Loaded = end.value
            return loaded
