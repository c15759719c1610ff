"""Slow, obvious decoders of the packed formats, one number at a time in plain Python, and random tensors.

Columns are read as one huge integer and float16 is rounded by `struct`, so nothing is shared with exlm.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

Tensors = dict[str, Tensor]

AWQ_NIBBLE = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # column of the eight → nibble of the word


def round_to_float16(x: float) -> float:
    """The nearest float16, ties to even, subnormals included; infinity past the end."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def read_bit_stream(words: Sequence[int], bits: int, count: int) -> list[int]:
    """The first `count` values of a little-endian bit stream."""
    number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [(number >> (i * bits)) & ((1 << bits) - 1) for i in range(count)]


def exl2(tensors: Mapping[str, Tensor], columns: Sequence[int]) -> Tensor:
    """(inputs, these columns) float16."""
    table = [number & 0xFFFF for number in tensors["q_groups"].tolist()]
    stops = [*table[3::2], tensors["q_weight"].shape[0]]
    inverse = [number & 0xFFFFFFFF for number in tensors["q_invperm"].tolist()]
    out = []
    for n in columns:
        words = tensors["q_weight"][:, n].tolist()
        stored = []
        for g, (bits, start, stop) in enumerate(zip(table[::2], table[1::2], stops, strict=True)):
            code = (int(tensors["q_scale"][g, n // 8]) >> (4 * (n % 8))) & 15
            scale = round_to_float16((code + 1) ** 2 * round_to_float16(tensors["q_scale_max"][g].item() / 256))
            for value in read_bit_stream(words[start:stop], bits, (stop - start) * 32 // bits):
                stored.append(round_to_float16((value - (1 << (bits - 1))) * scale))
        out.append([stored[i] for i in inverse])
    return torch.tensor(out, dtype=torch.float64).to(torch.float16).T


def gptq(
    tensors: Mapping[str, Tensor],
    bits: int,
    *,
    shift: int,
    group_of: Callable[[int], int],
    columns: Sequence[int],
) -> Tensor:
    """(inputs, these columns) float16, the group of each input given by `group_of`."""
    rows = tensors["qweight"].shape[0] * 32 // bits
    groups, outputs = tensors["scales"].shape
    zeros = [read_bit_stream(tensors["qzeros"][g].tolist(), bits, outputs) for g in range(groups)]
    scales = tensors["scales"].tolist()
    out = []
    for n in columns:
        codes = read_bit_stream(tensors["qweight"][:, n].tolist(), bits, rows)
        owners = map(group_of, range(rows))
        out.append(
            [
                round_to_float16((code - zeros[g][n] - shift) * round_to_float16(scales[g][n]))
                for code, g in zip(codes, owners, strict=True)
            ]
        )
    return torch.tensor(out, dtype=torch.float64).to(torch.float16).T


def awq(tensors: Mapping[str, Tensor], group_size: int) -> Tensor:
    """(inputs, outputs) float16."""
    words, zeros, scales = (tensors[name].tolist() for name in ("qweight", "qzeros", "scales"))
    out = []
    for k, row in enumerate(words):
        g = k // group_size
        line = []
        for n, scale in enumerate(scales[g]):
            nibble = 4 * AWQ_NIBBLE[n % 8]
            code, zero = (row[n // 8] >> nibble) & 15, (zeros[g][n // 8] >> nibble) & 15
            line.append(round_to_float16((code - zero) * round_to_float16(scale)))
        out.append(line)
    return torch.tensor(out, dtype=torch.float64).to(torch.float16)


def random_words(*shape: int) -> Tensor:
    """Random bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def random_scales(*shape: int) -> Tensor:
    """Scales as large as those of real files, some subnormal."""
    return (torch.rand(shape) * 10.0 ** torch.randint(-6, 0, shape)).to(torch.float16)


def exl2_tensors(groups: Sequence[tuple[int, int]], outputs: int, *, permuted: bool = True) -> Tensors:
    """Random EXL2 tensors with these groups of (bits, words)."""
    entries, start, rows = [], 0, 0
    for bits, words in groups:
        entries += [bits, start]
        start += words
        rows += words * 32 // bits
    return {
        "q_weight": random_words(start, outputs),
        "q_scale": random_words(len(groups), outputs // 8),
        "q_scale_max": random_scales(len(groups)),
        "q_groups": torch.tensor(entries).to(torch.int16),
        "q_invperm": (torch.randperm(rows) if permuted else torch.arange(rows)).to(torch.int32),
    }


def gptq_tensors(inputs: int, outputs: int, bits: int, group_of: Sequence[int], groups: int) -> Tensors:
    """Random GPTQ tensors with this g_idx."""
    return {
        "qweight": random_words(inputs * bits // 32, outputs),
        "qzeros": random_words(groups, outputs * bits // 32),
        "scales": random_scales(groups, outputs),
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Same names, types, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def matrices(folder: Path, suffix: str) -> Iterator[tuple[str, Tensors]]:
    """Every matrix in a folder's files that has a tensor called `suffix`, with all its tensors."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            for name in names:
                if name.endswith(f".{suffix}"):
                    key = name.removesuffix(suffix)
                    yield (
                        key[:-1],
                        {other.removeprefix(key): file.get_tensor(other) for other in names if other.startswith(key)},
                    )


def references(path: Path, prefix: str) -> Tensors:
    """The reference's dequantised matrices by key."""
    with safe_open(path, "pt") as file:
        names = [name for name in list(file.keys()) if name.startswith(prefix)]
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def quantization_config(folder: Path) -> dict[str, object]:
    """What config.json says."""
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert isinstance(raw, dict)
    return raw
