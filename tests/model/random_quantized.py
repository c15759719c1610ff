"""Random quantised matrices, and models whose matrices are replaced by them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exlm.formats import Exl2Scales, PackedWeight, PlainScales, Segment
from exlm.formats.packed import pack


def random_gptq(inputs: int, outputs: int, group: int = 32) -> PackedWeight:
    codes = torch.randint(0, 16, (inputs, outputs))
    scales = (torch.rand(inputs // group, outputs) * 0.02 + 0.005).half()
    zeros = torch.randint(1, 16, scales.shape, dtype=torch.uint8)
    segment = Segment(4, (group,) * (inputs // group), pack(codes, 4), PlainScales(scales), zeros)
    return PackedWeight("gptq", inputs, outputs, (segment,), torch.float16)


def random_exl2(inputs: int, outputs: int) -> PackedWeight:
    """Half the rows in 5 bits, half in 3, in a shuffled order."""
    half = inputs // 2
    segments = []
    for bits in (5, 3):
        scales = Exl2Scales(torch.randint(0, 16, (1, outputs), dtype=torch.uint8), torch.tensor([0.03]).half())
        codes = pack(torch.randint(0, 1 << bits, (half, outputs)), bits)
        segments.append(Segment(bits, (half,), codes, scales, zero=1 << (bits - 1)))
    order = torch.randperm(inputs).int()
    return PackedWeight("exl2", inputs, outputs, tuple(segments), torch.float16, order)


def replace_matrices(folder: Path, dense_folder: Path | None, write: Any, make: Any, pattern: str) -> None:
    """Quantise all matrices whose names match; `dense_folder`, if given, gets the same model as floats."""
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for name in [n for n in tensors if re.search(pattern, n)]:
        key = name.removesuffix(".weight")
        weight = make(tensors[name].shape[1], tensors[name].shape[0])
        dense[name] = weight.dequantize().T.contiguous().float() if dense_folder else tensors[name]
        del tensors[name]
        tensors |= {f"{key}.{suffix}": tensor.contiguous() for suffix, tensor in write(weight).items()}
    save_file(tensors, folder / "model.safetensors")
    if dense_folder:
        dense_folder.mkdir()
        (dense_folder / "config.json").write_text((folder / "config.json").read_text())
        save_file(dense, dense_folder / "model.safetensors")
