"""How GGUF's quantised blocks lie in their bytes: codes, scales and minimums taken apart, nothing multiplied.

A block holds 32 or 256 neighbouring inputs of one output. Each `Layout` says where its numbers are and cuts
a stack of blocks into plain tensors; `gguf` puts those together as a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of the IQ4 types stand for."""


class Parts(NamedTuple):
    """What a stack of blocks (columns, blocks, bytes) holds; every part begins with (columns, blocks)."""

    codes: Tensor  # (…, inputs) uint8
    scales: Tensor  # (…, 1) float16
    sub_scales: Tensor | None = None  # (…, groups) uint8 or int8, to be multiplied with `scales`
    minimum: Tensor | None = None  # (…, 1) float16
    sub_minimum: Tensor | None = None  # (…, groups) uint8, to be multiplied with `minimum`


@dataclass(frozen=True)
class Layout:
    """One quantised type: a value is (code - zero) · scale - minimum."""

    block: int  # inputs in a block
    size: int  # bytes of a block
    bits: int
    group: int  # inputs that share a scale
    cut: Callable[[Tensor], Parts]
    zero: int = 0
    codebook: tuple[int, ...] = ()


def split(values: Tensor, run: int) -> Tensor:
    """(…, n) → (…, n / run, run), in the same memory."""
    return values.view(*values.shape[:-1], -1, run)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, (…, 1)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _spread(packed: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """(…, bytes) → (…, shifts, bytes): every byte moved down by each shift, its lowest bits kept."""
    return torch.stack([(packed >> shift) & mask for shift in shifts], -2)


def _bits(packed: Tensor) -> Tensor:
    """(…, bytes) → (…, 8 · bytes): single bits, the lowest of each byte first."""
    return _spread(packed.unsqueeze(-1), range(8), 1).flatten(-3)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """(…, bytes) → (…, 2 · bytes): of each `run` bytes first all low halves, then all high ones."""
    return _spread(split(packed, run), (0, 4), 15).flatten(-3)


def _pairs(packed: Tensor) -> Tensor:
    """(…, bytes) → (…, 4 · bytes): of each 32 bytes the lowest two bits of all, then the next two."""
    return _spread(split(packed, 32), (0, 2, 4, 6), 3).flatten(-3)


def _planes(packed: Tensor) -> Tensor:
    """(…, 32) → (…, 256): the lowest bit of all 32 bytes, then the second of all, and so on."""
    return _spread(packed, range(8), 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), minimum=-_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:], 16) | (_bits(blocks[..., 2:6]) << 4)
    return Parts(codes, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:], 16) | (_bits(blocks[..., 4:8]) << 4)
    return Parts(codes, _half(blocks, 0), minimum=-_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[..., 2:] ^ 128, _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Parts:
    both = blocks[..., :16]
    return Parts(_pairs(blocks[..., 16:80]), _half(blocks, 80), both & 15, _half(blocks, 82), both >> 4)


def _q3_k(blocks: Tensor) -> Parts:
    codes = _pairs(blocks[..., 32:96]) | (_planes(blocks[..., :32]) << 2)
    low = _nibbles(blocks[..., 96:104], 8)
    high = _spread(blocks[..., 104:108], (0, 2, 4, 6), 3).flatten(-2)
    return Parts(codes, _half(blocks, 108), _signed(low | (high << 4)))


def _q4_k(blocks: Tensor) -> Parts:
    scales, minimum = _six_bits(blocks[..., 4:16])
    return Parts(_nibbles(blocks[..., 16:], 32), _half(blocks, 0), scales, _half(blocks, 2), minimum)


def _q5_k(blocks: Tensor) -> Parts:
    scales, minimum = _six_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 48:], 32) | (_planes(blocks[..., 16:48]) << 4)
    return Parts(codes, _half(blocks, 0), scales, _half(blocks, 2), minimum)


def _q6_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., :128], 64) | (_pairs(blocks[..., 128:192]) << 4)
    return Parts(codes, _half(blocks, 208), blocks[..., 192:208].view(torch.int8))


def _iq4_xs(blocks: Tensor) -> Parts:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = torch.stack([(blocks[..., 2:4] >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return Parts(_nibbles(blocks[..., 8:], 16), _half(blocks, 0), _signed(low | (high << 4)))


def _signed(codes: Tensor) -> Tensor:
    """Six-bit numbers that mean -32 to 31."""
    return codes.view(torch.int8) - 32


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of six bits from the twelve bytes of Q4_K and Q5_K.

    The first four of each have a byte for themselves, whose top two bits belong to the last four.
    """
    scales, minimum, rest = split(packed, 4).unbind(-2)
    return (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), -1),
        torch.cat((minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)), -1),
    )


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(32, 18, 4, 32, _q4_0, zero=8),
    "Q4_1": Layout(32, 20, 4, 32, _q4_1),
    "Q5_0": Layout(32, 22, 5, 32, _q5_0, zero=16),
    "Q5_1": Layout(32, 24, 5, 32, _q5_1),
    "Q8_0": Layout(32, 34, 8, 32, _q8_0, zero=128),
    "Q2_K": Layout(256, 84, 2, 16, _q2_k),
    "Q3_K": Layout(256, 110, 3, 16, _q3_k, zero=4),
    "Q4_K": Layout(256, 144, 4, 32, _q4_k),
    "Q5_K": Layout(256, 176, 5, 32, _q5_k),
    "Q6_K": Layout(256, 210, 6, 16, _q6_k, zero=32),
    "IQ4_NL": Layout(32, 18, 4, 32, _q4_0, codebook=IQ4_VALUES),
    "IQ4_XS": Layout(256, 136, 4, 32, _iq4_xs, codebook=IQ4_VALUES),
}
"""The types that stay packed in memory, by the name GGUF gives them."""


def squeeze(codes: Tensor, bits: int) -> Tensor:
    """(columns, inputs) uint8 → (columns, words) int32: the bit stream of `bits`, one column after the other.

    Eight codes at a time: as one 64-bit number whose bytes move together in three steps.
    """
    if bits == 8:
        return codes.contiguous().view(torch.int32)
    lanes = codes.contiguous().view(torch.int64)
    for lane in (8, 16, 32):
        used = bits * lane // 8
        even = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * lane))
        lanes = (lanes & even) | ((lanes >> (lane - used)) & (even << used))
    stream = split(lanes.view(torch.uint8), 8)[..., :bits]
    return stream.flatten(-2).view(torch.int32)
