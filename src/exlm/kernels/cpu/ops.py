"""The operations that are one C call each: products, embedding lookups, norms and gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import NormFn
from .bindings import Library
from .repack import PackedMatrix


class PackedLinear:
    """x @ W + bias for any number of rows; a row's result is the same bits in any batch."""

    def __init__(self, library: Library, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._linear = library.linear
        self._address = matrix.address
        self._outputs = matrix.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), float32."""
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self.matrix.in_features
        self._linear(self._address, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads())
        return y


class PackedEmbedding:
    """Embedding lookup in a packed matrix, in the precision its format defines."""

    def __init__(self, library: Library, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self._dequantize_columns = library.dequantize_columns
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, tokens) ids → (rows, tokens, inputs)."""
        ids = ids.long().contiguous()
        out = torch.empty(*ids.shape, self.matrix.in_features)
        self._dequantize_columns(self.matrix.address, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out.to(self._dtype)


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """x / rms(x) · scale, alone or after an addition."""

    library: Library
    scale: Tensor  # (width,)
    eps: float
    fallback: NormFn  # for x that is not contiguous float32

    def __call__(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            return self.fallback(x)
        out = torch.empty_like(x)
        self._run(x, None, None, out)
        return out

    def _run(self, x: Tensor, residual: Tensor | None, total: Tensor | None, out: Tensor) -> None:
        width = self.scale.shape[0]
        self.library.rms_norm(
            *(x.data_ptr(), None if residual is None else residual.data_ptr(), self.scale.data_ptr(), self.eps),
            *(x.numel() // width, width, None if total is None else total.data_ptr(), out.data_ptr()),
            torch.get_num_threads(),
        )


@dataclass(frozen=True, eq=False)
class AddRmsNorm(RmsNorm):
    """The sum x + y, and its norm."""

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(…, width) twice → (…, width) twice."""
        if y is None:
            return x, RmsNorm.__call__(self, x)
        if not (x.dtype is y.dtype is torch.float32 and x.is_contiguous() and y.is_contiguous()):
            total = x + y
            return total, self.fallback(total)
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._run(x, y, total, out)
        return total, out


@dataclass(frozen=True, eq=False)
class SiluMul:
    """silu(gate) · up."""

    library: Library

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two tensors of one shape → one."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        self.library.silu_mul(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), torch.get_num_threads())
        return out
