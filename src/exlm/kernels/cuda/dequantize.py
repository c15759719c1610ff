"""Packed matrices times many rows: unpacked side by side, then multiplied as any others.

An unpacked matrix lives no longer than its product. Few rows are multiplied straight from codes, elsewhere.
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
from .gemm import KernelVariant, TileConfig, dealt, weight_struct
from .lanes import TILE_K, TILE_N
from .module_cache import CudaModule, ModuleCache
from .prepacked import as_uint16
from .repack import MmaWeight

SOURCE = Path(__file__).with_name("csrc") / "dequantize.cu"
_SHARES = 6


class _Shares(ctypes.Structure):
    _fields_ = (("digits", ctypes.c_int * _SHARES), ("blocks", ctypes.c_int * _SHARES))


class _Target(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("inputs", ctypes.c_int),
        ("stride", ctypes.c_int),
    )


class Dequantizer:
    """A matrix in full; what stays the same is made once."""

    def __init__(self, modules: ModuleCache, tiles: MmaWeight, abreast: int = 8) -> None:
        """`abreast` tiles are a thread block's: with 8 of them it writes 256 bytes of every input."""
        self._modules, self.tiles, self._abreast = modules, tiles, abreast
        self.columns = tiles.tiles * TILE_N
        """Outputs, up to the end of the last tile."""
        device = tiles.main.bricks.device
        self._source = None if tiles.source is None else as_uint16(tiles.source).to(device, non_blocking=True)
        self._grid = -(-tiles.tiles // abreast), tiles.blocks, 1
        self._shares = _Shares()
        for place, share in enumerate(tiles.shares):
            self._shares.digits[place], self._shares.blocks[place] = share.digits, share.blocks
        self._matrix = weight_struct(tiles)

    @property
    def nbytes(self) -> int:
        """Bytes in full."""
        return 2 * self.tiles.in_features * self.columns

    @cached_property
    def _made(self) -> CudaModule:
        chain_defines = dealt(KernelVariant((self.tiles.layout,)), 1, TileConfig())
        return self._modules.module(SOURCE, **chain_defines, BLOCK_TILES=self._abreast)

    def fill(self, out: Tensor) -> None:
        """Fill `out`, (inputs, columns) float16, or such a part of wider rows; it is 16 bytes aligned."""
        source = None if self._source is None else self._source.data_ptr()
        target = _Target(out.data_ptr(), source, self.tiles.in_features, out.stride(0))
        given = self._matrix, self._shares, target
        memory = TILE_K * (self._abreast * TILE_N * 2 + 4)  # the numbers, and which inputs they belong to
        self._made.launch("dequantize", self._grid, self._abreast * 32, memory, given)


class DequantGemm:
    """Matrices of the same inputs times many rows, in one product."""

    def __init__(self, unpackers: Sequence[Dequantizer]) -> None:
        self._unpackers = tuple(unpackers)
        self._widths = [one.columns for one in unpackers]
        self._bias = _biases([one.tiles for one in unpackers])

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """(rows, inputs) → (rows, outputs) of each, perhaps parts of wider rows."""
        matrix = self.dequantize()
        y = torch.mm(rows, matrix) if self._bias is None else torch.addmm(self._bias, rows, matrix)
        parts = y.split_with_sizes(self._widths, 1)
        return [part[:, : one.tiles.out_features] for part, one in zip(parts, self._unpackers, strict=True)]

    def dequantize(self) -> Tensor:
        """(inputs, columns of all) float16: as it is multiplied, the factors are in it."""
        first = self._unpackers[0].tiles
        shape = first.in_features, sum(self._widths)
        out = torch.empty(shape, dtype=torch.float16, device=first.main.bricks.device)
        for dequantizer, part in zip(self._unpackers, out.split_with_sizes(self._widths, 1), strict=True):
            dequantizer.fill(part)
        return out


def dequant_gemms(unpackers: Sequence[Dequantizer]) -> list[DequantGemm]:
    """All in one product, or each in its own where that would take too much room."""
    if sum(one.nbytes for one in unpackers) <= b.MAX_DEQUANT_BYTES:
        return [DequantGemm(unpackers)]
    return [DequantGemm([one]) for one in unpackers]


def _biases(matrices: Sequence[MmaWeight]) -> Tensor | None:
    """For every column; None where there are none."""
    if all(one.bias is None for one in matrices):
        return None
    device = matrices[0].main.bricks.device
    own = (
        torch.zeros(one.out_features, dtype=torch.float16, device=device) if one.bias is None else one.bias
        for one in matrices
    )
    return torch.cat([F.pad(bias, (0, -len(bias) % TILE_N)) for bias in own])
