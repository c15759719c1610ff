"""Norms, RoPE and activation functions, each in one launch; float32 inside.

A norm takes the residual addition before it along. RoPE is also the prologue of the attention kernels, which
call `load_roped` on its tables instead of launching `rope_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import spec
from ..reference import RotaryEmbedding

MAX_NORM_WIDTH = 1 << 15
_NORM_ELEMENTS = 1024  # of a program, when vectors are short
_ROPE_TOKENS = 16  # of one head in a program
_ACT_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def norm_kernel(
    x, y, sum_out, out, scale, bias, count, eps, x_stride, y_stride,
    WIDTH: tl.constexpr, HEADS_PER_ROW: tl.constexpr, PER_HEAD: tl.constexpr, LAYER: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMS or layer norm of (count, WIDTH) vectors, HEADS_PER_ROW of them in a row of x.

    ADD: norm of x + y, whose sum is stored too. PER_HEAD: each head has its own scale. A program takes ROWS
    whole vectors, a number that depends on WIDTH alone: a vector's output does not depend on its neighbours.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    ok = (row < count) & (col < WIDTH)
    x_offset = (row // HEADS_PER_ROW) * x_stride + (row % HEADS_PER_ROW) * WIDTH + col
    out_offset = row * WIDTH + col
    value = tl.load(x + x_offset, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + row * y_stride + col, mask=ok, other=0.0).to(tl.float32)
        stored = value.to(sum_out.dtype.element_ty)
        tl.store(sum_out + out_offset, stored, mask=ok)
        value = stored.to(tl.float32)
    if LAYER:
        value = tl.where(ok, value - tl.sum(value, 1)[:, None] / WIDTH, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 1)[:, None] / WIDTH + eps)
    scale_column = (row % HEADS_PER_ROW) * WIDTH + col if PER_HEAD else col
    value *= tl.load(scale + scale_column, mask=ok, other=0.0)
    if BIAS:
        value += tl.load(bias + col, mask=col < WIDTH, other=0.0)
    tl.store(out + out_offset, value.to(out.dtype.element_ty), mask=ok)


def as_rows(x: Tensor, lead: int) -> tuple[Tensor, int]:
    """x as rows with one stride between them, made of the first `lead` dimensions; and that stride."""
    for i in range(lead - 1):
        if x.shape[i] != 1 and x.stride(i) != x.shape[i + 1] * x.stride(i + 1):
            x = x.contiguous()
            break
    inside = x.shape[lead:]
    if x.stride(-1) != 1 or (len(inside) == 2 and x.stride(-2) != inside[1]):
        x = x.contiguous()
    strides = [x.stride(i) for i in range(lead) if x.shape[i] != 1]
    return x, strides[-1] if strides else x.numel()


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS or layer norm over the last dimension; a scale of (heads, head_dim) gives each head its own."""

    scale: Tensor
    bias: Tensor | None
    eps: float
    layer: bool
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) or (rows, tokens, heads, width)."""
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        x, stride = as_rows(x, 2)
        self._launch(x, x, x, out, stride, 0, False)
        return out

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y and its norm, in one launch."""
        if y is None:
            return x, self(x)
        summed = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        (x, x_stride), (y, y_stride) = as_rows(x, 2), as_rows(y, 2)
        self._launch(x, y, summed, out, x_stride, y_stride, True)
        return summed, out

    def _launch(
        self, x: Tensor, y: Tensor, summed: Tensor, out: Tensor, x_stride: int, y_stride: int, add: bool
    ) -> None:
        width = x.shape[-1]
        block = triton.next_power_of_2(width)
        rows = max(1, _NORM_ELEMENTS // block)
        count = x.numel() // width
        with torch.cuda.device_of(x):
            norm_kernel[(-(-count // rows),)](
                x, y, summed, out, self.scale, self.scale if self.bias is None else self.bias, count,
                self.eps, x_stride, y_stride, WIDTH=width, HEADS_PER_ROW=x.shape[2] if x.dim() == 4 else 1,
                PER_HEAD=self.scale.dim() == 2, LAYER=self.layer, ADD=add, BIAS=self.bias is not None,
                ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 512)),
            )  # fmt: skip


class RopeLayout(NamedTuple):
    """How RoPE rotates a head, as a constant that kernels are compiled for."""

    DIM: int = 0  # the first columns of a head, which are rotated; 0 if RoPE is already applied
    INTERLEAVED: bool = False  # pairs are neighbours (GPT-J), not half of DIM apart (NeoX)
    MROPE: bool = False  # each column takes its position from its own axis (time, height, width)


@triton.jit
def load_roped(head_ptr, d, position_ptr, ok, rope, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr):
    """Load columns d of heads and apply RoPE, as float32: the prologue of every kernel that reads q or new k.

    head_ptr, d and position_ptr broadcast to the output's shape; columns from HEAD_DIM on are zero. `rope`
    is (cos, sin, mrope_axis, pos_axis_stride).
    """
    cos, sin, mrope_axis, pos_axis_stride = rope
    x = tl.load(head_ptr + d, mask=ok & (d < HEAD_DIM), other=0.0).to(tl.float32)
    if ROPE.DIM > 0:
        half: tl.constexpr = ROPE.DIM // 2
        in_rope = ok & (d < ROPE.DIM)
        if ROPE.INTERLEAVED:
            column, partner, is_first = d // 2, d ^ 1, d % 2 == 0
        else:
            is_first = d < half
            column, partner = tl.where(is_first, d, d - half), tl.where(is_first, d + half, d - half)
        other = tl.load(head_ptr + partner, mask=in_rope, other=0.0).to(tl.float32)
        if ROPE.MROPE:
            axis = tl.load(mrope_axis + column, mask=d < ROPE.DIM, other=0)
            position = tl.load(position_ptr + axis * pos_axis_stride, mask=in_rope, other=0)
        else:
            position = tl.load(position_ptr, mask=ok, other=0)
        entry = position * half + column
        c = tl.load(cos + entry, mask=in_rope, other=1.0)
        s = tl.load(sin + entry, mask=in_rope, other=0.0)
        x = x * c + tl.where(is_first, -other, other) * s
    return x


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    q, k, q_out, k_out, positions, cos, sin, mrope_axis, tokens, q_row_stride, q_token_stride, k_row_stride,
    k_token_stride, pos_row_stride, pos_token_stride, pos_axis_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to q and k. Program (block of tokens, head of q or k, row)."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok = token < tokens
    position_ptr = positions + row * pos_row_stride + token * pos_token_stride
    rope = (cos, sin, mrope_axis, pos_axis_stride)
    if head < Q_HEADS:
        x = load_roped(
            q + row * q_row_stride + token * q_token_stride + head * HEAD_DIM, d, position_ptr, ok, rope, HEAD_DIM, ROPE
        )
        out_offset = ((row * tokens + token) * Q_HEADS + head) * HEAD_DIM + d
        tl.store(q_out + out_offset, x.to(q_out.dtype.element_ty), mask=ok & (d < HEAD_DIM))
    else:
        kv_head = head - Q_HEADS
        x = load_roped(
            k + row * k_row_stride + token * k_token_stride + kv_head * HEAD_DIM,
            d, position_ptr, ok, rope, HEAD_DIM, ROPE,
        )  # fmt: skip
        out_offset = ((row * tokens + token) * KV_HEADS + kv_head) * HEAD_DIM + d
        tl.store(k_out + out_offset, x.to(k_out.dtype.element_ty), mask=ok & (d < HEAD_DIM))


@dataclass(frozen=True, eq=False)
class RopeTables:
    """Cosines and sines of every position; attention kernels read them, calling applies them by a kernel."""

    cos: Tensor  # (length, dim / 2)
    sin: Tensor
    mrope_axis: Tensor  # (dim / 2,) the M-RoPE axis whose position each column takes
    dim: int
    interleaved: bool

    @classmethod
    def of(cls, rope: spec.Rope, length: int, device: torch.device) -> RopeTables:
        """The tables of the reference backend."""
        tables = RotaryEmbedding(rope, length, device)
        return cls(tables.cos, tables.sin, tables.mrope_axis.int(), rope.dim, rope.style == "gptj")

    def layout(self, positions: Tensor) -> RopeLayout:
        """What kernels are compiled for."""
        return RopeLayout(self.dim, self.interleaved, positions.dim() == 3)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after RoPE, in one launch."""
        (q, k), (rows, tokens, heads, head) = (contiguous_heads(q), contiguous_heads(k)), q.shape
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        grid = (-(-tokens // _ROPE_TOKENS), heads + k.shape[2], rows)
        with torch.cuda.device_of(q):
            rope_kernel[grid](
                q, k, q_out, k_out, positions, self.cos, self.sin, self.mrope_axis, tokens, q.stride(0),
                q.stride(1), k.stride(0), k.stride(1), *position_strides(positions), Q_HEADS=heads,
                KV_HEADS=k.shape[2], HEAD_DIM=head, BLOCK_D=triton.next_power_of_2(head),
                ROPE=self.layout(positions), BLOCK_T=_ROPE_TOKENS,
            )  # fmt: skip
        return q_out, k_out


def contiguous_heads(x: Tensor) -> Tensor:
    """(rows, tokens, heads, head_dim) with a token's heads contiguous, as the kernels read them."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


def position_strides(positions: Tensor) -> tuple[int, int, int]:
    """Strides of rows, tokens and M-RoPE axes."""
    return positions.stride(-2), positions.stride(-1), positions.stride(0) if positions.dim() == 3 else 0


@triton.jit
def tanh(x):
    """tanh by way of sigmoid: Triton has no tanh that every target supports."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation function that the spec names ACT, on float32."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACT == "relu2")
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


@triton.jit
def activation_kernel(
    gate, up, out, width, gate_stride, up_stride, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """act(gate), or act(gate) · up if GATED. Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < width
    x = activate(tl.load(gate + row * gate_stride + col, mask=ok, other=0.0).to(tl.float32), ACT)
    if GATED:
        x *= tl.load(up + row * up_stride + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, x.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class Activation:
    """An activation function, alone or gated."""

    act: spec.Activation

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) → the same shape."""
        return self._launch(x, None)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) · up."""
        return self._launch(gate, up)

    def _launch(self, gate: Tensor, up: Tensor | None) -> Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        width = gate.shape[-1]
        gate, gate_stride = as_rows(gate, gate.dim() - 1)
        other, up_stride = (gate, 0) if up is None else as_rows(up, up.dim() - 1)
        grid = (out.numel() // width, -(-width // _ACT_BLOCK))
        with torch.cuda.device_of(gate):
            activation_kernel[grid](
                gate, other, out, width, gate_stride, up_stride, ACT=self.act, GATED=up is not None, BLOCK=_ACT_BLOCK
            )
        return out
