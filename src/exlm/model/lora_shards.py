"""Adapters in a model that is divided among processes: each rank's part of a change, and the way to it.

Rank 0 reads and checks an adapter; the others are handed their parts and open no file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from .. import spec
from ..lora import InstallLora, LoraWeights, ModuleChange, RemoveLora
from ..parallel import MatrixSlice, Message


class RoleShard(NamedTuple):
    """What a rank has of a role's matrix: its name there, and which part; None is all of it."""

    role: str
    cut: MatrixSlice | None = None


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


def decode_change(message: Message, model: spec.Model, device: torch.device) -> ModuleChange:
    """The change of an order, for the part of a model that `model` describes."""
    adapter_id, role = message.values["number"], message.values["role"]
    if message.action == "restore":
        return RemoveLora(adapter_id, role)
    return InstallLora.for_model(model, adapter_id, role, LoraWeights(**message.tensors)).to(device)
