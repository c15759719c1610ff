"""Dense matrices with few outputs, such as routers (csrc/dense.cu): one launch for those that share an input."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats import DenseWeight
from .. import interface as b
from .gemm_m16 import RmsNorm
from .module_cache import ModuleSource, sizeof_defines

SOURCE = Path(__file__).with_name("csrc") / "dense.cu"

MAX_DENSE_OUTPUTS = 1024
"""Outputs up to which a thread block for each one or two of them is faster than cuBLAS, whose split-K takes two
launches."""

_MAX_INPUTS = 16384  # their weights are in registers of a thread block
_MAX_ROWS = 64
_THREADS = 128  # THREADS of the source
_BLOCK_ROWS = 4


class _DenseParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "norm_weight", "bias", "y")),
        ("rows", ctypes.c_longlong),
        ("eps", ctypes.c_float),
        ("outputs", ctypes.c_int),
    )


class CudaDense:
    """norm(x) @ W + bias, the norm being optional; more than 64 rows by cuBLAS."""

    def __init__(self, modules: ModuleSource, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None) -> None:
        """`weight`: (outputs, inputs) float16, contiguous; `bias`: float16."""
        outputs, inputs = weight.shape
        if outputs > MAX_DENSE_OUTPUTS:
            raise Unsupported(f"a dense matrix of {outputs} outputs, at most {MAX_DENSE_OUTPUTS}")
        if inputs % 8 or inputs > _MAX_INPUTS:
            raise Unsupported(f"a dense matrix of {inputs} inputs, only of multiples of 8 up to {_MAX_INPUTS}")
        self._modules = modules
        self.weight, self.bias = weight, bias
        self._norm = None if norm is None else RmsNorm(norm.weight.float().contiguous(), norm.eps)
        self._float_bias = None if bias is None else bias.float()

    def defines(self, rows: int) -> dict[str, int]:
        """The -D constants of dense.cu for so many rows."""
        inputs = self.weight.shape[1]
        two_outputs = rows > _BLOCK_ROWS and inputs <= _MAX_INPUTS // 2  # else registers or latency decide
        sizes = sizeof_defines(DenseParams=_DenseParams)
        shape = {"INPUTS": inputs, "BLOCK_OUTPUTS": 2 if two_outputs else 1, "BLOCK_ROWS": min(rows, _BLOCK_ROWS)}
        return {**shape, "RMS_NORM": int(self._norm is not None), "NO_FMAD": 1, **sizes}

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.data_ptr() % 16:
            rows = rows.clone()
        if not 1 <= len(rows) <= _MAX_ROWS:
            return self.product(x if self._norm is None else _normalized(x, self._norm))
        outputs = self.weight.shape[0]
        y = torch.empty(*x.shape[:-1], outputs, dtype=torch.float16, device=x.device)
        params = _DenseParams(rows.data_ptr(), self.weight.data_ptr(), y=y.data_ptr(), rows=len(rows), outputs=outputs)
        if self._norm is not None:
            params.norm_weight, params.eps = self._norm.weight.data_ptr(), self._norm.eps
        if self._float_bias is not None:
            params.bias = self._float_bias.data_ptr()
        defines = self.defines(len(rows))
        block_rows, block_outputs = defines["BLOCK_ROWS"], defines["BLOCK_OUTPUTS"]
        grid = -(-outputs // block_outputs), -(-len(rows) // block_rows), 1
        smem = 4 * block_rows * _THREADS // 32 * (block_outputs + defines["RMS_NORM"])
        self._modules.module(SOURCE, **defines).launch("dense_few_outputs", grid, _THREADS, smem, (params,))
        return y

    def product(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs) without the norm, by cuBLAS."""
        return F.linear(x, self.weight, self.bias)


def dense_linear(modules: ModuleSource, weight: DenseWeight) -> CudaDense:
    """A matrix with few outputs; `Unsupported` for others."""
    if weight.data.dtype is not torch.float16:
        raise Unsupported(f"dense matrices of {str(weight.data.dtype).removeprefix('torch.')}, only of float16")
    return CudaDense(modules, weight.data.contiguous(), weight.bias)


class CudaFusedDense(b.FusedLinear):
    """Dense matrices that share an input, and the norm before them, in one launch."""

    def __init__(self, modules: ModuleSource, matrices: Sequence[CudaDense], norm: RmsNorm | None) -> None:
        self._widths = [matrix.weight.shape[0] for matrix in matrices]
        if sum(self._widths) > MAX_DENSE_OUTPUTS:
            raise Unsupported(f"dense matrices of {sum(self._widths)} outputs, at most {MAX_DENSE_OUTPUTS}")
        biases = [matrix.bias for matrix in matrices]
        bias = None
        if any(one is not None for one in biases):
            pairs = zip(matrices, biases, strict=True)
            bias = torch.cat([m.weight.new_zeros(m.weight.shape[0]) if one is None else one for m, one in pairs])
        stacked = torch.cat([matrix.weight for matrix in matrices])
        for matrix, part in zip(matrices, stacked.split_with_sizes(self._widths), strict=True):
            matrix.weight = part  # so that each weight is in memory once
        self._stacked = CudaDense(modules, stacked, bias, norm)

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each."""
        first, *others = self._stacked(x).split_with_sizes(self._widths, -1)
        return [first if residual is None else first + residual, *others]

    def unfused(self, x: Tensor) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each, without the norm."""
        return list(self._stacked.product(x).split_with_sizes(self._widths, -1))


def _normalized(x: Tensor, norm: RmsNorm) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.eps).to(x.dtype)
