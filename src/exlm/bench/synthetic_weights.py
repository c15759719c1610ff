"""Random matrices in the layout of each format, made directly on the device they are used on.

Scales are chosen so that a forward pass stays finite. `nbytes` is the size the matrix would have in the
format's files, which is what a decode step must read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import (
    DenseWeight,
    Exl2Scales,
    KQuantScales,
    PackedWeight,
    PlainScales,
    Scales,
    Segment,
    Weight,
)
from ..formats.bits import num_words
from ..formats.exl2 import BIT_WIDTHS
from ..formats.gguf_types import BLOCK_LAYOUTS
from .shapes import FORMATS

GROUP_SIZE = 128
FINE_GROUP_SIZE = 32  # rows of a group in EXL2's segments of more bits
_SQUARED_SCALE_RMS = 0.482  # root mean square of (k / 16)² for k = 1 to 16, EXL2's scales


class RandomTensors:
    """Random tensors on one device, from a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def integers(self, rows: int, columns: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """(rows, columns) integers from `low` to `high` - 1."""
        out = torch.empty(rows, columns, dtype=dtype, device=self.device)
        return out.random_(low, high, generator=self._generator)

    def words(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) int32 with random bits: packed codes of any width."""
        return self.integers(rows, columns, -(2**31), 2**31, torch.int32)

    def floats(self, rows: int, columns: int, deviation: float) -> Tensor:
        """(rows, columns) float16 with eight significant bits, since most models are trained in bfloat16."""
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        return out.normal_(0, deviation, generator=self._generator).half()

    def permutation(self, length: int) -> Tensor:
        """An int32 permutation, the same for each length: matrices that share an input share it in files."""
        same = torch.Generator(self.device).manual_seed(length)
        return torch.randperm(length, generator=same, device=self.device, dtype=torch.int32)


class WeightFormat(Protocol):
    """A format with its number of bits."""

    def weight(
        self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float
    ) -> Weight:
        """A random matrix with about this standard deviation."""
        ...

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Bytes of the matrix in files."""
        ...


@dataclass(frozen=True)
class Exl2:
    """EXL2: several widths with a given average, widest first; the head has its own width."""

    bits: float = 4.1
    head_bits: int = 6

    def segments(self, inputs: int, outputs: int, head: bool) -> list[tuple[int, tuple[int, ...]]]:
        """(bits, rows of each group) of each segment, widest first; a few percent are wider than the rest."""
        if head:
            return [(self.head_bits, group_sizes(inputs, GROUP_SIZE))]
        total = self.bits * inputs * outputs
        base = max(
            (w for w in BIT_WIDTHS if self._bits([(w, group_sizes(inputs, GROUP_SIZE))], outputs) <= total),
            default=0,
        )
        if not base:
            raise InputError(f"{self.bits} bits are too few for EXL2: it needs at least 2.1 with its scales.")
        gap = total - self._bits([(base, group_sizes(inputs, GROUP_SIZE))], outputs)
        wider = [w for w in BIT_WIDTHS if w > base][:2]
        found: list[tuple[int, tuple[int, ...]]] = []
        rest = inputs
        for width in reversed(wider):
            more = FINE_GROUP_SIZE * (width - base) * outputs + 3 * outputs  # and three more scales of 4 bits
            share = gap / 4 if width != wider[0] else gap
            count = min(int(share / more + 0.5), rest // FINE_GROUP_SIZE - 1)
            if count > 0:
                found.append((width, (FINE_GROUP_SIZE,) * count))
                rest, gap = rest - FINE_GROUP_SIZE * count, gap - more * count
        return [*found, (base, group_sizes(rest, GROUP_SIZE))]

    def weight(
        self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float
    ) -> Weight:
        """Random codes, scales and permutation."""
        parts = []
        for bits, sizes in self.segments(inputs, outputs, head):
            largest = deviation * unit_scale(bits) / _SQUARED_SCALE_RMS
            scales = Exl2Scales(
                random.integers(len(sizes), outputs, 0, 16, torch.uint8),
                torch.full((len(sizes),), largest, device=random.device).half(),
            )
            codes = random.words(num_words(sum(sizes), bits), outputs)
            parts.append(Segment(bits, sizes, codes, scales, zero=1 << (bits - 1)))
        return PackedWeight("exl2", inputs, outputs, tuple(parts), torch.float16, random.permutation(inputs))

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Codes, 4-bit scales, the largest scale of each group, group table and permutation."""
        return self._bits(self.segments(inputs, outputs, head), outputs) // 8

    @staticmethod
    def _bits(segments: list[tuple[int, tuple[int, ...]]], outputs: int) -> int:
        rows = sum(sum(sizes) for _, sizes in segments)
        codes = sum(bits * sum(sizes) * outputs for bits, sizes in segments)
        return codes + sum(len(sizes) for _, sizes in segments) * (4 * outputs + 48) + 32 * rows


@dataclass(frozen=True)
class Gptq:
    """GPTQ: one width, groups of 128 with zero points; the head stays float16, as GPTQ tools leave it."""

    bits: int = 4

    def weight(
        self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float
    ) -> Weight:
        """Random codes and zero points, equal scales."""
        if head:
            return DenseWeight(random.floats(outputs, inputs, deviation))
        sizes, centre = group_sizes(inputs, GROUP_SIZE), 1 << (self.bits - 1)
        scales = torch.full(
            (len(sizes), outputs), deviation * unit_scale(self.bits), device=random.device
        ).half()
        zeros = random.integers(len(sizes), outputs, centre - 1, centre + 2, torch.uint8)
        codes = random.words(num_words(inputs, self.bits), outputs)
        segment = Segment(self.bits, sizes, codes, PlainScales(scales), zeros)
        return PackedWeight("gptq", inputs, outputs, (segment,), torch.float16)

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Codes, scales, zero points and the group index of each row."""
        if head:
            return 2 * inputs * outputs
        tables = len(group_sizes(inputs, GROUP_SIZE)) * outputs * (16 + self.bits)
        return (inputs * outputs * self.bits + tables) // 8 + 4 * inputs


@dataclass(frozen=True)
class Gguf:
    """GGUF: a K-quant if inputs are a multiple of 256, else blocks of 32; the head in Q6_K or Q8_0."""

    kind: str = "Q4_K"
    narrow: str = "Q4_1"  # where inputs are no multiple of 256

    def name(self, inputs: int, head: bool) -> str:
        """The GGUF type of a matrix."""
        whole = inputs % 256 == 0
        if head and self.kind != "Q8_0":
            return "Q6_K" if whole else "Q8_0"
        return self.kind if whole else self.narrow

    def weight(
        self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float
    ) -> Weight:
        """Random codes and scales; minimums are set so that the mean is near zero."""
        name = self.name(inputs, head)
        layout = BLOCK_LAYOUTS[name]
        step = deviation * unit_scale(layout.bits)
        sizes = (layout.group_size,) * (inputs // layout.group_size)
        minimum = None
        if not layout.zero:
            minimum = self._scales(inputs, outputs, name, step * ((1 << layout.bits) - 1) / 2, random)
        segment = Segment(
            layout.bits,
            sizes,
            random.words(num_words(inputs, layout.bits), outputs),
            self._scales(inputs, outputs, name, step, random),
            layout.zero,
            minimum,
        )
        return PackedWeight(f"gguf {name}", inputs, outputs, (segment,), torch.float32)

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Whole blocks."""
        layout = BLOCK_LAYOUTS[self.name(inputs, head)]
        return inputs // layout.block_size * layout.block_bytes * outputs

    @staticmethod
    def _scales(inputs: int, outputs: int, name: str, value: float, random: RandomTensors) -> Scales:
        layout = BLOCK_LAYOUTS[name]
        inside = layout.block_size // layout.group_size
        if inside == 1:
            return PlainScales(
                torch.full((inputs // layout.block_size, outputs), value, device=random.device).half()
            )
        dtype = torch.int8 if layout.zero else torch.uint8
        parents = torch.arange(inputs // layout.block_size, dtype=torch.int32, device=random.device)
        return KQuantScales(
            random.integers(inputs // layout.group_size, outputs, 32, 64, dtype),
            torch.full((inputs // layout.block_size, outputs), value / 48, device=random.device).half(),
            parents.repeat_interleave(inside),
        )


@dataclass(frozen=True)
class Dense:
    """Dense float16."""

    def weight(
        self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float
    ) -> Weight:
        """Normally distributed values."""
        return DenseWeight(random.floats(outputs, inputs, deviation))

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Two bytes a weight."""
        return 2 * inputs * outputs


_GGUF_TYPES = {4.5: ("Q4_K", "Q4_1"), 5.5: ("Q5_K", "Q5_1"), 6.5625: ("Q6_K", "Q8_0"), 8.5: ("Q8_0", "Q8_0")}


def weight_format(name: str, bits: float | None = None) -> WeightFormat:
    """The format of this name, with about so many bits per weight."""
    if name not in FORMATS:
        raise InputError(f"The format must be one of {', '.join(FORMATS)}, found {name!r}.")
    wanted = FORMATS[name] if bits is None else bits
    if name == "exl2":
        return Exl2(wanted)
    if name == "gguf":
        if wanted not in _GGUF_TYPES:
            raise InputError(f"GGUF types here have {', '.join(map(str, _GGUF_TYPES))} bits, found {wanted}.")
        return Gguf(*_GGUF_TYPES[wanted])
    if name == "gptq":
        if wanted not in (2, 3, 4, 8):
            raise InputError(f"GPTQ has 2, 3, 4 or 8 bits, found {wanted}.")
        return Gptq(int(wanted))
    if wanted != 16:
        raise InputError(f"Dense weights have 16 bits, found {wanted}.")
    return Dense()


def group_sizes(rows: int, size: int) -> tuple[int, ...]:
    """Rows of each group; the last may be smaller."""
    return (size,) * (rows // size) + ((rows % size,) if rows % size else ())


def unit_scale(bits: int) -> float:
    """The scale that gives uniformly distributed codes of this width a standard deviation of one."""
    return float(12**0.5 / (1 << bits))
