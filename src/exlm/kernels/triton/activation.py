"""The MLP's nonlinearities in one launch, alone or times the other half; float32 inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import spec
from .norm import rows_of

_BLOCK = 1024


@triton.jit
def tanh(x):
    """By the one function that every target has."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def bend(x, ACT: tl.constexpr):
    """A nonlinearity by its name in the description."""
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
def bend_kernel(
    gate, up, out, width, gate_step, up_step, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of `width` numbers, a block of one row for each program."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < width
    x = bend(tl.load(gate + row * gate_step + col, mask=ok, other=0.0).to(tl.float32), ACT)
    if GATED:
        x *= tl.load(up + row * up_step + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, x.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class Bend:
    """A nonlinearity."""

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
        gate, gate_step = rows_of(gate, gate.dim() - 1)
        other, step = (gate, 0) if up is None else rows_of(up, up.dim() - 1)
        grid = (out.numel() // width, -(-width // _BLOCK))
        with torch.cuda.device_of(gate):
            bend_kernel[grid](
                gate, other, out, width, gate_step, step, ACT=self.act, GATED=up is not None, BLOCK=_BLOCK
            )
        return out
