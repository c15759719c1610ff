"""Checkpoints of a few tensors, and short calls to read them."""

from __future__ import annotations

from pathlib import Path

import torch

from exlm.checkpoint import SafetensorsCheckpoint
from exlm.formats import DenseWeight, Weight
from exlm.spec.tensor_names import TensorNames
from tests.checkpoint.safetensors_bytes import write_safetensors

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def open_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], names: TensorNames | None = None
) -> SafetensorsCheckpoint:
    """A checkpoint of these tensors in one file."""
    return SafetensorsCheckpoint(write_safetensors(folder, tensors), names or TensorNames())


def read_weight(
    checkpoint: SafetensorsCheckpoint,
    role: str,
    k: int,
    n: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    fallback: str | None = None,
) -> DenseWeight:
    """A matrix on the CPU, float32 unless `dtype` is given."""
    weight: Weight = checkpoint.weight(role, k, n, bias=bias, dtype=dtype, device=CPU, fallback=fallback)
    assert isinstance(weight, DenseWeight)
    return weight


def read_tensor(checkpoint: SafetensorsCheckpoint, role: str, *shapes: tuple[int, ...], **more: object) -> torch.Tensor:
    """A tensor of one of these shapes on the CPU, float32 unless `dtype` is given."""
    shape = shapes if len(shapes) > 1 else shapes[0]
    return checkpoint.tensor(role, shape, **{"dtype": torch.float32, "device": CPU, **more})  # type: ignore[arg-type]
