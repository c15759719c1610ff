"""How GGUF's quantised blocks lie in their bytes: codes, scales and minimums taken apart, nothing multiplied.

A block holds 32 or 256 neighbouring inputs of one output. Each `Layout` says where its numbers are and cuts
a stack of blocks into plain tensors; `gguf` puts those together as a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .bytewise import joined, shifted, single_bits, taken

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of the IQ4 types stand for."""


class Parts(NamedTuple):
    """What a stack of blocks (columns, blocks, bytes) holds; other parts than codes begin like it.

    Codes are uint8, (turns, columns, blocks, runs, run): a block's inputs are its first run's of the first
    turn, of the second, and so on; then its second run's.
    """

    codes: Tensor
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
    return taken(blocks, at, 2).view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """(…, bytes) → (2, …, runs, run): of each run of bytes all low halves, and all high ones."""
    return shifted(split(packed, run), (0, 4), 15)


def _pairs(packed: Tensor) -> Tensor:
    """(…, bytes) → (4, …, runs, 32): of each 32 bytes the lowest two bits of all, the next two, and so on."""
    return shifted(split(packed, 32), (0, 2, 4, 6), 3)


def _planes(packed: Tensor, turns: int) -> Tensor:
    """(columns, blocks, 32) → (turns, columns, blocks, 8 / turns, 32).

    The lowest bit of all 32 bytes is the first turn's of the first run, the second bit the next turn's.
    """
    found = shifted(packed, range(8), 1)
    return found.view(-1, turns, *packed.shape).permute(1, 2, 3, 0, 4).contiguous()


def _in_order(codes: Tensor) -> Tensor:
    """(turns, columns, blocks, runs, run) → (columns, blocks, all of them)."""
    return codes.permute(1, 2, 3, 0, 4).flatten(2)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(taken(blocks, 2, 16), 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(taken(blocks, 4, 16), 16), _half(blocks, 0), minimum=-_half(blocks, 2))


def _five(blocks: Tensor, at: int) -> Tensor:
    """Codes of 5 bits in one run: their highest bits lie before the others."""
    low = _in_order(_nibbles(taken(blocks, at + 4, 16), 16))
    return split(joined(low, single_bits(taken(blocks, at, 4)), 4), 32)[None]


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_five(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_five(blocks, 4), _half(blocks, 0), minimum=-_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(split(taken(blocks, 2, 32) ^ 128, 32)[None], _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Parts:
    low, high = shifted(taken(blocks, 0, 16), (0, 4), 15)
    return Parts(_pairs(taken(blocks, 16, 64)), _half(blocks, 80), low, _half(blocks, 82), high)


def _q3_k(blocks: Tensor) -> Parts:
    codes = joined(_pairs(taken(blocks, 32, 64)), _planes(taken(blocks, 0, 32), 4), 2)
    low = _in_order(_nibbles(taken(blocks, 96, 8), 8))
    high = torch.stack([(taken(blocks, 104, 4) >> shift) & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    return Parts(codes, _half(blocks, 108), _signed(low | (high << 4)))


def _q4_k(blocks: Tensor) -> Parts:
    scales, minimum = _six_bits(blocks)
    return Parts(_nibbles(taken(blocks, 16, 128), 32), _half(blocks, 0), scales, _half(blocks, 2), minimum)


def _q5_k(blocks: Tensor) -> Parts:
    scales, minimum = _six_bits(blocks)
    codes = joined(_nibbles(taken(blocks, 48, 128), 32), _planes(taken(blocks, 16, 32), 2), 4)
    return Parts(codes, _half(blocks, 0), scales, _half(blocks, 2), minimum)


def _q6_k(blocks: Tensor) -> Parts:
    low = taken(blocks, 0, 128).view(*blocks.shape[:2], 2, 2, 32).permute(3, 0, 1, 2, 4).contiguous()
    codes = joined(shifted(low, (0, 4), 15).flatten(0, 1), _pairs(taken(blocks, 128, 64)), 4)
    return Parts(codes, _half(blocks, 208), taken(blocks, 192, 16).view(torch.int8))


def _iq4_xs(blocks: Tensor) -> Parts:
    both = taken(blocks, 4, 4)
    low = torch.stack((both & 15, both >> 4), -1).flatten(-2)
    high = torch.stack([(taken(blocks, 2, 2) >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return Parts(_nibbles(taken(blocks, 8, 128), 16), _half(blocks, 0), _signed(low | (high << 4)))


def _signed(codes: Tensor) -> Tensor:
    """Six-bit numbers that mean -32 to 31."""
    return codes.view(torch.int8) - 32


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of six bits from twelve bytes of Q4_K and Q5_K.

    The first four of each have a byte for themselves, whose top two bits belong to the last four. Four bytes
    are one number here.
    """
    scales, minimum, rest = (taken(blocks, at, 4).view(torch.int32) for at in (4, 8, 12))
    own, low, top = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    return (
        torch.cat((scales & own, (rest & low) | ((scales >> 2) & top)), -1).view(torch.uint8),
        torch.cat((minimum & own, ((rest >> 4) & low) | ((minimum >> 2) & top)), -1).view(torch.uint8),
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
