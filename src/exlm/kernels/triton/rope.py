"""Rotary positions: heads turned while they are loaded, by tables of the reference's own making.

`turned` is what every kernel that needs queries or keys calls. A `Rotation` can be called by itself, but an
attention of this backend takes its tables and turns on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import spec
from ..reference.rope import RotaryEmbedding as Tables

_TOKENS = 16  # of one head in a program


@triton.jit
def turned(
    heads, d, place, ok, cos, sin, planes, plane_step,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Numbers d of the heads at some pointers, turned by the positions at others, as float32.

    All three broadcast to the answer's shape. The first DIM of HEAD numbers turn; those from HEAD on are
    zero. With PLANES, each number's position is in its own plane.
    """
    x = tl.load(heads + d, mask=ok & (d < HEAD), other=0.0).to(tl.float32)
    if DIM > 0:
        half: tl.constexpr = DIM // 2
        turning = ok & (d < DIM)
        if PAIRS:
            column, partner, first = d // 2, d ^ 1, d % 2 == 0
        else:
            first = d < half
            column, partner = tl.where(first, d, d - half), tl.where(first, d + half, d - half)
        other = tl.load(heads + partner, mask=turning, other=0.0).to(tl.float32)
        if PLANES:
            plane = tl.load(planes + column, mask=d < DIM, other=0)
            position = tl.load(place + plane * plane_step, mask=turning, other=0)
        else:
            position = tl.load(place, mask=ok, other=0)
        at = position * half + column
        c = tl.load(cos + at, mask=turning, other=1.0)
        s = tl.load(sin + at, mask=turning, other=0.0)
        x = x * c + tl.where(first, -other, other) * s
    return x


@triton.jit(do_not_specialize=["tokens"])
def turn_kernel(
    q, k, q_out, k_out, positions, cos, sin, planes, tokens,
    q_row, q_token, k_row, k_token, row_step, token_step, plane_step,
    HEADS: tl.constexpr, KV: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A run of tokens of one head of q or k: program (run, head, row)."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = t < tokens
    place = positions + row * row_step + t * token_step
    if head < HEADS:
        x = turned(q + row * q_row + t * q_token + head * HEAD, d, place, ok, cos, sin, planes, plane_step,
                   HEAD, DIM, PAIRS, PLANES)  # fmt: skip
        there = ((row * tokens + t) * HEADS + head) * HEAD + d
        tl.store(q_out + there, x.to(q_out.dtype.element_ty), mask=ok & (d < HEAD))
    else:
        h = head - HEADS
        x = turned(k + row * k_row + t * k_token + h * HEAD, d, place, ok, cos, sin, planes, plane_step,
                   HEAD, DIM, PAIRS, PLANES)  # fmt: skip
        there = ((row * tokens + t) * KV + h) * HEAD + d
        tl.store(k_out + there, x.to(k_out.dtype.element_ty), mask=ok & (d < HEAD))


@dataclass(frozen=True, eq=False)
class Rotation:
    """Tables of sine and cosine, and the ways to use them."""

    cos: Tensor  # (length, dim / 2)
    sin: Tensor
    planes: Tensor  # (dim / 2,) which plane of positions each column follows
    dim: int
    pairs: bool

    @classmethod
    def of(cls, rope: spec.Rope, length: int, device: torch.device) -> Rotation:
        """The reference's tables."""
        tables = Tables(rope, length, device)
        return cls(tables.cos, tables.sin, tables.mrope_axis.int(), rope.dim, rope.style == "gptj")

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Heads in, heads out, in one launch."""
        (q, k), (rows, tokens, heads, head) = (headwise(q), headwise(k)), q.shape
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        grid = (-(-tokens // _TOKENS), heads + k.shape[2], rows)
        with torch.cuda.device_of(q):
            turn_kernel[grid](
                q, k, q_out, k_out, positions, self.cos, self.sin, self.planes, tokens,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), *steps(positions),
                HEADS=heads, KV=k.shape[2], HEAD=head, D=triton.next_power_of_2(head), DIM=self.dim,
                PAIRS=self.pairs, PLANES=positions.dim() == 3, TOKENS=_TOKENS,
            )  # fmt: skip
        return q_out, k_out


def headwise(x: Tensor) -> Tensor:
    """Heads of a token side by side, as every kernel here reads them; tokens and rows may be apart."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


def steps(positions: Tensor) -> tuple[int, int, int]:
    """From row to row, from token to token, from plane to plane."""
    return positions.stride(-2), positions.stride(-1), positions.stride(0) if positions.dim() == 3 else 0
