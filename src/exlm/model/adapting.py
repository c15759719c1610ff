"""Adapters in a model that is divided among processes: each rank's part of a change, and the way to it.

Rank 0 reads and checks an adapter; the others are handed their parts and open no file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from .. import spec
from ..lora import InstallLora, LoraWeights, ModuleChange, RemoveLora
from ..parallel import Cut, Order


class Held(NamedTuple):
    """What a rank has of a role's matrix: its name there, and which part; None is all of it."""

    role: str
    cut: Cut | None = None


def part(change: ModuleChange, held: Held) -> ModuleChange:
    """What a change means to a rank."""
    if isinstance(change, InstallLora) and held.cut is not None:
        change = replace(change, weights=change.weights.shard(*held.cut))
    return replace(change, role=held.role)


def pack(change: ModuleChange) -> Order:
    """A change as an order."""
    values = {"dropped": [], "number": change.adapter_id, "role": change.role}
    if isinstance(change, RemoveLora):
        return Order("restore", values)
    return Order("adapt", values, change.weights._asdict())


def unpack(order: Order, model: spec.Model, device: torch.device) -> ModuleChange:
    """The change of an order, for the part of a model that `model` describes."""
    number, role = order.values["number"], order.values["role"]
    if order.do == "restore":
        return RemoveLora(number, role)
    return InstallLora.for_model(model, number, role, LoraWeights(**order.tensors)).to(device)
