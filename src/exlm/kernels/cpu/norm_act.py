"""What lies between the matrices, each as one call: root mean square norms, and silu gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import NormFn
from .bindings import Library


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """x / root-mean-square(x) · scale, alone or behind an addition."""

    library: Library
    scale: Tensor  # (width,)
    eps: float
    other: NormFn  # for x that is not contiguous float32

    def __call__(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            return self.other(x)
        out = torch.empty_like(x)
        self._run(x, None, None, out)
        return out

    def _run(self, x: Tensor, more: int | None, total: int | None, out: Tensor) -> None:
        width = self.scale.shape[0]
        self.library.rms_norm(
            *(x.data_ptr(), more, self.scale.data_ptr(), self.eps, x.numel() // width, width),
            *(total, out.data_ptr(), torch.get_num_threads()),
        )


@dataclass(frozen=True, eq=False)
class AddRmsNorm(RmsNorm):
    """An addition whose sum is kept, then the norm."""

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The sum, and the sum normalised."""
        if y is None:
            return x, RmsNorm.__call__(self, x)
        if not (x.dtype is y.dtype is torch.float32 and x.is_contiguous() and y.is_contiguous()):
            total = x + y
            return total, self.other(total)
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._run(x, y.data_ptr(), total.data_ptr(), out)
        return total, out


@dataclass(frozen=True, eq=False)
class SiluMul:
    """silu(gate) · up."""

    library: Library

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two of one shape."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        self.library.silu_mul(
            gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), torch.get_num_threads()
        )
        return out
