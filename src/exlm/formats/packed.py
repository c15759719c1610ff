"""What a stored matrix is: the protocol `Weight`, plain floats (`DenseWeight`), and everything else (`PackedWeight`).

`PackedWeight` is the one in-memory form of every quantised matrix, be it EXL2, GPTQ, AWQ or GGUF. W has `in_features`
rows (the K dimension) and `out_features` columns (N). Its rows are stored in the order of `perm` and cut into segments,
runs of one bit width; a segment is cut into groups of neighbouring rows, which share a scale, a zero point and a
minimum (an offset) in each column:

      perm       codes, a bit stream down each column      one row of each table per group
      (K,)             columns n = 0 … N-1                 scale   zero   minimum  (groups, N)
    ┌──────┐     ┌──────────────────────────┐  ─┐
    │  17  │ i=0 │ code[0,0]  code[0,1]  …  │   │ group 0 ─→  s[0,n]  z[0,n]  m[0,n]  ─┐
    │   4  │   1 │ code[1,0]  code[1,1]  …  │  ─┤                                      │ segment 0,
    │  31  │   2 │ code[2,0]  code[2,1]  …  │   │ group 1 ─→  s[1,n]  z[1,n]  m[1,n]   │ say of 5 bits
    │   0  │   3 │ code[3,0]  code[3,1]  …  │  ─┘                                     ─┘
    ├──────┤     ├──────────────────────────┤  ─┐                                     ─┐ segment 1,
    │   9  │   4 │ code[4,0]  code[4,1]  …  │   │ group 0 ─→  s[0,n]  z[0,n]  m[0,n]   │ say of 3 bits
    │   …  │   … │     …                    │  ─┘                                     ─┘
    └──────┘     └──────────────────────────┘

    W[perm[i], n] = (value(code[i, n]) - zero[g, n]) · scale[g, n] - minimum[g, n]     g: the group of row i

A code is an unsigned integer of the segment's width; `value` is the code itself, or its entry in the segment's codebook
(GGUF's IQ4 types). EXL2 has several segments and a permutation, and its zero points are 2^(bits-1); GPTQ has one
segment, and a permutation for act-order; AWQ and GGUF have one segment and no permutation. Only GGUF has minimums.

Codes of 2 to 8 bits are a little-endian bit stream: code i of width b takes bits i·b to (i+1)·b of its column's 32-bit
words, lowest bit first, and may cross a word border. Kernels repack the codes for themselves.

Kernels know only this form, so a new scalar-quantised format costs one reader. `dequantize()` defines what
the bits mean, with the roundings that each format prescribes: it is the oracle of every kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from ..errors import InputError

WORD_BITS = 32

Range = tuple[int, int]


# -- codes -----------------------------------------------------------------------------------------


def num_words(length: int, bits: int) -> int:
    """Words that `length` values need in each column."""
    return -(-length * bits // WORD_BITS)


def unpack(words: Tensor, bits: int, length: int) -> Tensor:
    """(words, columns) int32 → (rows, columns) uint8."""
    _check_words(words, bits, length)
    period_words, period_values = _repeat_period(bits)
    mask = (1 << bits) - 1
    out = torch.empty(length, words.shape[1], dtype=torch.uint8, device=words.device)
    for i in range(min(period_values, length)):
        target = out[i::period_values]
        word, shift = divmod(i * bits, WORD_BITS)
        value = words[word::period_words][: len(target)] >> shift
        if shift + bits > WORD_BITS:
            # The shift is arithmetic: mask the copies of the sign bit.
            value &= (1 << (WORD_BITS - shift)) - 1
            value |= words[word + 1 :: period_words][: len(target)] << (WORD_BITS - shift)
        target.copy_(value.bitwise_and_(mask))
    return out


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, columns) of whole numbers below 2^bits → (words, columns) int32; the last word ends in zeros."""
    rows, columns = values.shape
    if values.numel():
        low, high = (int(edge) for edge in values.aminmax())
        if low < 0 or high >> bits:
            raise InputError(f"{high if low >= 0 else low} does not fit {bits} bits.")
    period_words, period_values = _repeat_period(bits)
    out = torch.zeros(num_words(rows, bits), columns, dtype=torch.int32, device=values.device)
    for i in range(min(period_values, rows)):
        source = values[i::period_values].to(torch.int32)
        word, shift = divmod(i * bits, WORD_BITS)
        out[word::period_words][: len(source)] |= source << shift
        if shift + bits > WORD_BITS:
            out[word + 1 :: period_words][: len(source)] |= source >> (WORD_BITS - shift)
    return out


def unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """(rows, words) int32 with a bit stream along each row → (rows, columns) uint8."""
    if 8 % bits:
        return unpack(words.T, bits, columns).T.contiguous()
    # No value crosses a byte: byte after byte is many times faster than column after column.
    _check_words(words.T, bits, columns)
    data, mask = words.reshape(-1).view(torch.uint8).view(len(words), -1), (1 << bits) - 1
    values = torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], 2)
    return values.view(len(words), -1)[:, :columns].contiguous()


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """(rows, columns) of whole numbers below 2^bits → (rows, words) int32, a bit stream along each row."""
    return pack(values.T, bits).T.contiguous()


def _check_words(words: Tensor, bits: int, length: int) -> None:
    if words.dtype is not torch.int32 or words.dim() != 2 or words.shape[0] != num_words(length, bits):
        raise InputError(
            f"{length} values of {bits} bits need ({num_words(length, bits)}, columns) words of int32, "
            f"found {words.dtype} of shape {tuple(words.shape)}."
        )


def _repeat_period(bits: int) -> tuple[int, int]:
    """After how many words the bit positions of values repeat, and how many values those words hold."""
    period_words = bits // math.gcd(bits, WORD_BITS)
    return period_words, period_words * WORD_BITS // bits


# -- scales ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scales(ABC):
    """A (groups, columns) table of factors; offsets (`Segment.minimum`) are stored the same way.

    A subclass for each of the three ways in which formats store scales. The two-level kinds stay small in
    memory, and keep what the file holds exactly, so that it can be written back bit for bit.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """The kind in words, for errors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held; the rows of the first are the groups."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.tensors[0].shape[0])

    @abstractmethod
    def expand(self) -> Tensor:
        """(groups, columns), float16 or float32 as the format defines."""

    @abstractmethod
    def take_groups(self, groups: Tensor) -> Self:
        """The table of these groups, in this order."""

    @abstractmethod
    def take_columns(self, index: Tensor) -> Self:
        """The table of these columns, in this order."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same table with every tensor passed through `change` (to move it to a device)."""
        return replace(self, **{field.name: change(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, eq=False)
class PlainScales(Scales):
    """Factors stored as they are: GPTQ, AWQ, and GGUF's types with one level of scales."""

    values: Tensor  # (groups, columns)

    @property
    def description(self) -> str:
        return f"plain {str(self.values.dtype).removeprefix('torch.')} scales"

    def expand(self) -> Tensor:
        return self.values

    def take_groups(self, groups: Tensor) -> PlainScales:
        return PlainScales(self.values[groups])

    def take_columns(self, index: Tensor) -> PlainScales:
        return PlainScales(self.values[:, index])


@dataclass(frozen=True, eq=False)
class Exl2Scales(Scales):
    """EXL2: (code + 1)² · (group_max / 256), both factors and the product rounded to float16.

    The product is often subnormal, and the quantiser chose its codes for the rounded value: the roundings are
    part of the format.
    """

    codes: Tensor  # (groups, columns) uint8, 0 to 15
    group_max: Tensor  # (groups,) float16, as the file has it

    description = "squared 4-bit scales"

    def expand(self) -> Tensor:
        unit = (self.group_max.float() / 256).half()
        return self.codes.float().add_(1).square_().mul_(unit.float()[:, None]).half()

    def take_groups(self, groups: Tensor) -> Exl2Scales:
        return Exl2Scales(self.codes[groups], self.group_max[groups])

    def take_columns(self, index: Tensor) -> Exl2Scales:
        return Exl2Scales(self.codes[:, index], self.group_max)


@dataclass(frozen=True, eq=False)
class KQuantScales(Scales):
    """GGUF's K-quants: a small integer per group times the float16 scale of its super-block, in float32."""

    codes: Tensor  # (groups, columns) int8 or uint8
    superblock_scales: Tensor  # (super-blocks, columns) float16
    superblock_of_group: Tensor  # (groups,) int32: the super-block of each group

    description = "two-level scales"

    def expand(self) -> Tensor:
        return self.superblock_scales.float()[self.superblock_of_group] * self.codes.float()

    def take_groups(self, groups: Tensor) -> KQuantScales:
        """These groups; super-blocks that none of them uses are dropped."""
        used, parents = torch.unique(self.superblock_of_group[groups], return_inverse=True)
        return KQuantScales(
            self.codes[groups], self.superblock_scales[used], parents.to(self.superblock_of_group.dtype)
        )

    def take_columns(self, index: Tensor) -> KQuantScales:
        return KQuantScales(self.codes[:, index], self.superblock_scales[:, index], self.superblock_of_group)


# -- weights ---------------------------------------------------------------------------------------


class Weight(Protocol):
    """A matrix of `in_features` by `out_features` (y = x @ W + bias) in some stored form."""

    @property
    def in_features(self) -> int:
        """Rows of W: the width of x."""
        ...

    @property
    def out_features(self) -> int:
        """Columns of W: the width of y."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """Added to y, shape (out_features,)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        ...

    def describe(self) -> str:
        """The stored form in a few words for `exlm info`: `dense float16`, `exl2 4.1 bit`."""
        ...

    def dequantize(self) -> Tensor:
        """W itself, (in_features, out_features): floats in their stored dtype, codes in that of their format."""
        ...

    def split(self, dim: int, ranges: Sequence[Range]) -> list[Self]:
        """Cut along inputs (dim 0: only the first piece keeps the bias) or outputs (dim 1)."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        ...


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A matrix of plain floats of any precision, kept as files store it: (out_features, in_features).

    `split` gives views into the same memory.
    """

    data: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return int(self.data.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def describe(self) -> str:
        return f"dense {str(self.data.dtype).removeprefix('torch.')}"

    def dequantize(self) -> Tensor:
        return self.data.T

    def split(self, dim: int, ranges: Sequence[Range]) -> list[DenseWeight]:
        if dim == 1:
            return [DenseWeight(self.data[a:b], None if self.bias is None else self.bias[a:b]) for a, b in ranges]
        return [DenseWeight(self.data[:, a:b], None if n else self.bias) for n, (a, b) in enumerate(ranges)]

    def to(self, device: torch.device) -> DenseWeight:
        return DenseWeight(self.data.to(device), None if self.bias is None else self.bias.to(device))


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of stored rows with codes of one width."""

    bits: int
    group_sizes: tuple[int, ...]  # rows of each group, from the first
    codes: Tensor  # (words, columns) int32, a bit stream down each column (`bits`)
    scales: Scales
    zero: int | Tensor = 0  # one for all, or (groups, columns) uint8
    minimum: Scales | None = None
    codebook: Tensor | None = None  # (2^bits,) the value of each code; None: the code itself

    def __post_init__(self) -> None:
        """Refuse a segment whose parts contradict each other, by a reader's mistake or a corrupt file."""
        if not 2 <= self.bits <= 8 or not self.group_sizes or min(self.group_sizes) < 1:
            raise InputError(f"A segment needs 2 to 8 bits and groups of at least 1 row, found {self.bits} bits.")
        if self.codes.shape[0] != num_words(self.in_features, self.bits) or self.scales.groups != len(self.group_sizes):
            raise InputError(
                f"A segment of {self.in_features} rows of {self.bits} bits in {len(self.group_sizes)} groups "
                f"does not match {self.codes.shape[0]} words and {self.scales.groups} scales."
            )
        tables = [self.zero.shape[0]] if isinstance(self.zero, Tensor) else []
        tables += [self.minimum.groups] if self.minimum is not None else []
        if any(rows != len(self.group_sizes) for rows in tables):
            raise InputError(f"{len(self.group_sizes)} groups do not match zero points or minimums of {tables}.")
        if self.codebook is not None and len(self.codebook) != 1 << self.bits:
            raise InputError(f"{self.bits} bits do not match a codebook of {len(self.codebook)} entries.")

    @property
    def in_features(self) -> int:
        """Rows of W in this segment."""
        return sum(self.group_sizes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        zero = (self.zero,) if isinstance(self.zero, Tensor) else ()
        minimum = self.minimum.tensors if self.minimum is not None else ()
        book = (self.codebook,) if self.codebook is not None else ()
        return (self.codes, *self.scales.tensors, *zero, *minimum, *book)

    def dequantize(self) -> Tensor:
        """(rows, columns) float32: the weights of this segment, before they are rounded to the dtype."""
        codes = unpack(self.codes, self.bits, self.in_features)
        plain = codes.float() if self.codebook is None else self.codebook.float()[codes.int()]
        if self._has_equal_groups:
            plain = plain.view(len(self.group_sizes), self.group_sizes[0], plain.shape[1])
        if isinstance(self.zero, Tensor):
            plain -= self._broadcast_over_rows(self.zero)
        elif self.zero:
            plain -= self.zero
        plain *= self._broadcast_over_rows(self.scales.expand())
        if self.minimum is not None:
            plain -= self._broadcast_over_rows(self.minimum.expand())
        return plain.view(codes.shape)

    def take_inputs(self, rows: Tensor) -> Segment:
        """The segment of these stored rows only (ascending), without groups that none of them is in."""
        sizes = torch.tensor(self.group_sizes)
        group_of_row = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[rows.cpu()]
        kept, counts = torch.unique_consecutive(group_of_row, return_counts=True)
        kept = kept.to(self.codes.device)
        codes = unpack(self.codes, self.bits, self.in_features)[rows.to(self.codes.device)]
        return replace(
            self,
            group_sizes=tuple(counts.tolist()),
            codes=pack(codes, self.bits),
            scales=self.scales.take_groups(kept),
            zero=self.zero[kept] if isinstance(self.zero, Tensor) else self.zero,
            minimum=None if self.minimum is None else self.minimum.take_groups(kept),
        )

    def take_columns(self, index: Tensor) -> Segment:
        """The segment of these columns, in this order."""
        return replace(
            self,
            codes=self.codes[:, index].contiguous(),
            scales=self.scales.take_columns(index),
            zero=self.zero[:, index] if isinstance(self.zero, Tensor) else self.zero,
            minimum=None if self.minimum is None else self.minimum.take_columns(index),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Segment:
        """The same segment with every tensor passed through `change`."""
        return replace(
            self,
            codes=change(self.codes),
            scales=self.scales.map(change),
            zero=change(self.zero) if isinstance(self.zero, Tensor) else self.zero,
            minimum=None if self.minimum is None else self.minimum.map(change),
            codebook=None if self.codebook is None else change(self.codebook),
        )

    @property
    def _has_equal_groups(self) -> bool:
        return len(set(self.group_sizes)) == 1

    def _broadcast_over_rows(self, table: Tensor) -> Tensor:
        """(groups, columns) as float32 that broadcasts over rows: equal groups need no copy for each row."""
        if self._has_equal_groups:
            return table.float()[:, None]
        return table.float().repeat_interleave(torch.tensor(self.group_sizes, device=table.device), 0)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A quantised matrix of `in_features` by `out_features`."""

    format_name: str  # for `describe` and errors: "exl2", "gptq", "awq", "gguf Q4_K"
    in_features: int
    out_features: int
    segments: tuple[Segment, ...]
    dtype: torch.dtype  # of dequantised weights: float16, or float32 for GGUF
    perm: Tensor | None = None  # (in_features,) the input feature each stored row belongs to; None: in order
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse a matrix whose parts contradict each other."""
        rows = sum(segment.in_features for segment in self.segments)
        if rows != self.in_features:
            raise InputError(f"{rows} stored rows cannot be a matrix of {self.in_features} inputs.")
        for segment in self.segments:
            if segment.codes.shape[1] != self.out_features:
                raise InputError(f"{segment.codes.shape[1]} stored columns for {self.out_features} outputs.")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        parts = [tensor for segment in self.segments for tensor in segment.tensors]
        return (*parts, *(t for t in (self.perm, self.bias) if t is not None))

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits(self) -> float:
        """Bits per weight, with scales and permutation, without the bias."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return 8 * (self.nbytes - bias) / (self.in_features * self.out_features)

    def describe(self) -> str:
        """`exl2 4.15 bit`."""
        return f"{self.format_name} {self.bits:.2f} bit"

    def dequantize(self) -> Tensor:
        """W, (in_features, out_features), in the precision that the format defines."""
        out = torch.empty(self.in_features, self.out_features, dtype=self.dtype, device=self.segments[0].codes.device)
        start = 0
        for segment in self.segments:
            stop = start + segment.in_features
            where = slice(start, stop) if self.perm is None else self.perm[start:stop].long()
            out[where] = segment.dequantize().to(self.dtype)
            start = stop
        return out

    def split(self, dim: int, ranges: Sequence[Range]) -> list[PackedWeight]:
        length, what = (self.out_features, "outputs") if dim == 1 else (self.in_features, "inputs")
        for a, b in ranges:
            if not 0 <= a < b <= length:
                raise InputError(f"{a} to {b} is no part of the {length} {what} of a matrix.")
        if dim == 1:
            device = self.segments[0].codes.device
            return [self.take_columns(torch.arange(a, b, device=device)) for a, b in ranges]
        return [self._take_inputs(a, b, keep_bias=n == 0) for n, (a, b) in enumerate(ranges)]

    def take_columns(self, index: Tensor) -> PackedWeight:
        """The weight of these outputs, in this order."""
        return replace(
            self,
            out_features=len(index),
            segments=tuple(segment.take_columns(index) for segment in self.segments),
            bias=None if self.bias is None else self.bias[index],
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight with every tensor passed through `change`."""
        return replace(
            self,
            segments=tuple(segment.map(change) for segment in self.segments),
            perm=None if self.perm is None else change(self.perm),
            bias=None if self.bias is None else change(self.bias),
        )

    def to(self, device: torch.device) -> PackedWeight:
        return self.map(lambda tensor: tensor.to(device))

    def _take_inputs(self, a: int, b: int, *, keep_bias: bool) -> PackedWeight:
        """The weight of inputs a to b: their stored rows, in whatever segments the permutation put them."""
        perm = torch.arange(self.in_features) if self.perm is None else self.perm.long().cpu()
        segments, perms, start = [], [], 0
        for segment in self.segments:
            here = perm[start : start + segment.in_features]
            rows = ((here >= a) & (here < b)).nonzero().flatten()
            if len(rows):
                segments.append(segment.take_inputs(rows))
                perms.append(here[rows] - a)
            start += segment.in_features
        new_perm = torch.cat(perms)
        return replace(
            self,
            in_features=b - a,
            segments=tuple(segments),
            perm=None if self.perm is None else new_perm.to(torch.int32).to(self.segments[0].codes.device),
            bias=self.bias if keep_bias else None,
        )
