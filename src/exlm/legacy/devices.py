"""Small helpers for tensors and devices that old programs import, often without using them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["pairwise", "safe_move_tensor", "torch_device"]


def safe_move_tensor(tensor: Any, device: int | str | torch.device, non_blocking: bool = False) -> Any:
    """A tensor, or each of a list or tuple of tensors, on a device; itself if it is there already."""
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    return type(tensor)(safe_move_tensor(one, device, non_blocking) for one in tensor)


def torch_device(idx: int) -> str:
    """The name of a GPU by its number; -1 is the processor."""
    return "cpu" if idx == -1 else f"cuda:{idx}"
