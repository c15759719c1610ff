"""Normalisation in one launch, with the addition before it where there is one; not for the widest vectors.

A program takes whole vectors, as many as its width alone decides, so a vector's answer does not depend on its
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1 << 15
_ELEMENTS = 1024  # a program's share when vectors are short


@triton.jit(do_not_specialize=["count"])
def norm_kernel(
    x, y, total, out, scale, bias, count, eps, x_step, y_step,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, OWN: tl.constexpr, LAYER: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(count, WIDTH) vectors, HEADS of them in a row of x; OWN gives each head its own scale."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    ok = (row < count) & (col < WIDTH)
    there = (row // HEADS) * x_step + (row % HEADS) * WIDTH + col
    here = row * WIDTH + col
    wide = tl.load(x + there, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(y + row * y_step + col, mask=ok, other=0.0).to(tl.float32)
        stored = wide.to(total.dtype.element_ty)
        tl.store(total + here, stored, mask=ok)
        wide = stored.to(tl.float32)
    if LAYER:
        wide = tl.where(ok, wide - tl.sum(wide, 1)[:, None] / WIDTH, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / WIDTH + eps)
    shelf = (row % HEADS) * WIDTH + col if OWN else col
    wide *= tl.load(scale + shelf, mask=ok, other=0.0)
    if BIAS:
        wide += tl.load(bias + col, mask=col < WIDTH, other=0.0)
    tl.store(out + here, wide.to(out.dtype.element_ty), mask=ok)


def rows_of(x: Tensor, lead: int) -> tuple[Tensor, int]:
    """x as rows of memory one step apart, `lead` dimensions forming the rows; and that step."""
    for i in range(lead - 1):
        if x.shape[i] != 1 and x.stride(i) != x.shape[i + 1] * x.stride(i + 1):
            x = x.contiguous()
            break
    inside = x.shape[lead:]
    if x.stride(-1) != 1 or (len(inside) == 2 and x.stride(-2) != inside[1]):
        x = x.contiguous()
    steps = [x.stride(i) for i in range(lead) if x.shape[i] != 1]
    return x, steps[-1] if steps else x.numel()


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
        x, step = rows_of(x, 2)
        self._launch(x, x, x, out, step, 0, False)
        return out

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        if y is None:
            return x, self(x)
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        (x, x_step), (y, y_step) = rows_of(x, 2), rows_of(y, 2)
        self._launch(x, y, total, out, x_step, y_step, True)
        return total, out

    def _launch(
        self, x: Tensor, y: Tensor, total: Tensor, out: Tensor, x_step: int, y_step: int, add: bool
    ) -> None:
        width = x.shape[-1]
        block = triton.next_power_of_2(width)
        rows = max(1, _ELEMENTS // block)
        count = x.numel() // width
        with torch.cuda.device_of(x):
            norm_kernel[(-(-count // rows),)](
                x, y, total, out, self.scale, self.scale if self.bias is None else self.bias, count, self.eps,
                x_step, y_step, WIDTH=width, HEADS=x.shape[2] if x.dim() == 4 else 1,
                OWN=self.scale.dim() == 2, LAYER=self.layer, ADD=add, BIAS=self.bias is not None, ROWS=rows,
                BLOCK=block,
                num_warps=min(16, max(4, block // 512)),
            )  # fmt: skip
