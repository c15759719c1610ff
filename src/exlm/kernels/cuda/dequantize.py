"""Packed weights times many rows: dequantised side by side (dequantize.cu), then one cuBLAS GEMM.

A dequantised weight lives no longer than its GEMM.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import interface as b
from .module_cache import CudaModule, ModuleCache, sizeof_defines
from .prepacked_acts import as_uint16
from .weight_tile import TILE_K, TILE_N, MmaWeight, TileLayout, WeightParams, tile_defines

SOURCE = Path(__file__).with_name("csrc") / "dequantize.cu"
_MAX_SPANS = 6  # one for each number of digits in the fine region (1 to 5), and the main region


class _DigitSpans(ctypes.Structure):
    _fields_ = (("num_digits", ctypes.c_int * _MAX_SPANS), ("k_blocks", ctypes.c_int * _MAX_SPANS))


class _DequantTarget(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("perm", ctypes.c_void_p),
        ("inputs", ctypes.c_int),
        ("stride", ctypes.c_int),
    )


def dequantize_defines(layout: TileLayout, block_tiles: int) -> dict[str, int]:
    """The -D constants of dequantize.cu."""
    sizes = sizeof_defines(MmaWeight=WeightParams, DigitSpans=_DigitSpans, DequantTarget=_DequantTarget)
    return {**tile_defines([layout]), "BLOCK_TILES": block_tiles, **sizes}


class Dequantizer:
    """Dequantises one weight; arguments that never change are made once."""

    def __init__(self, modules: ModuleCache, weight: MmaWeight, block_tiles: int = 8) -> None:
        """`block_tiles`: n16 columns of a thread block; 8 of them write 256 bytes of every input."""
        self._modules, self.weight, self._block_tiles = modules, weight, block_tiles
        self.columns = weight.n_tiles * TILE_N
        """Outputs, up to the end of the last tile."""
        self._perm = None if weight.perm is None else as_uint16(weight.perm).to(weight.device, non_blocking=True)
        self._spans = _DigitSpans()
        for i, span in enumerate(weight.spans):
            self._spans.num_digits[i], self._spans.k_blocks[i] = span.num_digits, span.k_blocks
        self._params = weight.params()

    @property
    def nbytes(self) -> int:
        """Bytes of the dequantised weight."""
        return 2 * self.weight.in_features * self.columns

    @cached_property
    def _module(self) -> CudaModule:
        return self._modules.module(SOURCE, **dequantize_defines(self.weight.layout, self._block_tiles))

    def fill(self, out: Tensor) -> None:
        """Fill `out`, (inputs, columns) float16, or such columns of a wider tensor, 16 bytes aligned."""
        perm = None if self._perm is None else self._perm.data_ptr()
        target = _DequantTarget(out.data_ptr(), perm, self.weight.in_features, out.stride(0))
        grid = -(-self.weight.n_tiles // self._block_tiles), self.weight.k_blocks, 1
        smem = TILE_K * (self._block_tiles * TILE_N * 2 + 4)  # the numbers, and which input each row is
        self._module.launch("dequantize", grid, self._block_tiles * 32, smem, (self._params, self._spans, target))


class DequantGemm:
    """Weights of the same inputs times many rows, in one GEMM."""

    def __init__(self, dequantizers: Sequence[Dequantizer]) -> None:
        self._dequantizers = tuple(dequantizers)
        self._columns = [one.columns for one in dequantizers]
        self._bias = _padded_bias([one.weight for one in dequantizers])

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """(rows, inputs) → (rows, outputs) of each weight, perhaps views of one wider tensor."""
        w = self.dequantize()
        y = torch.mm(rows, w) if self._bias is None else torch.addmm(self._bias, rows, w)
        parts = y.split_with_sizes(self._columns, 1)
        return [part[:, : one.weight.out_features] for part, one in zip(parts, self._dequantizers, strict=True)]

    def dequantize(self) -> Tensor:
        """(inputs, columns of all weights) float16, with each weight's factor applied."""
        first = self._dequantizers[0].weight
        out = torch.empty(first.in_features, sum(self._columns), dtype=torch.float16, device=first.device)
        for dequantizer, part in zip(self._dequantizers, out.split_with_sizes(self._columns, 1), strict=True):
            dequantizer.fill(part)
        return out


def dequant_gemms(dequantizers: Sequence[Dequantizer]) -> list[DequantGemm]:
    """One GEMM for all weights, or one for each where that would take more than MAX_DEQUANT_BYTES."""
    if sum(one.nbytes for one in dequantizers) <= b.MAX_DEQUANT_BYTES:
        return [DequantGemm(dequantizers)]
    return [DequantGemm([one]) for one in dequantizers]


def _padded_bias(weights: Sequence[MmaWeight]) -> Tensor | None:
    """The bias of every column; None if no weight has one."""
    if all(one.bias is None for one in weights):
        return None
    biases = (
        torch.zeros(one.out_features, dtype=torch.float16, device=one.device) if one.bias is None else one.bias
        for one in weights
    )
    return torch.cat([F.pad(bias, (0, -len(bias) % TILE_N)) for bias in biases])
