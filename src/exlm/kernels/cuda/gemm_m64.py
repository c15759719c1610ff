"""GEMM of packed weights with 17 to 64 rows (gemm_m64.cu), and `GemmDispatch`, which chooses a kernel by the rows.

How outputs and inputs are divided among thread blocks does not depend on the rows, so a row's output is the same
bits in any batch of 17 to 64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import Unsupported
from .gemm_m16 import RESERVED_SMEM, GemmM16, KernelVariant, TileConfig, balance_occupancy
from .module_cache import sizeof_defines
from .prepacked_acts import MAX_M16, PackedActs, chain_args, chain_defines, epilogue_smem_bytes
from .weight_tile import TILE_K, TILE_N

SOURCE = Path(__file__).with_name("csrc") / "gemm_m64.cu"
MAX_M64 = 64
"""Rows up to which gemm_m64 runs."""

_SPLITS = (1, 2, 3, 4, 6, 8)
_REDUCE_COST = 4.0  # of a split-K reduction, in k tiles
_CROWD_COST = 0.75  # by how much a thread block is slower for each other one on its SM
_MIN_SM_SHARE = 0.7  # of the SMs that must be busy on average for thread blocks of eight warps
_MAX_EARLY_BLOCKS = 3  # of an SM: more thread blocks are no faster with programmatic dependent launch


class _SplitKWorkspace(ctypes.Structure):
    _fields_ = (("partial_sums", ctypes.c_void_p), ("arrivals", ctypes.c_void_p))


@dataclass(frozen=True)
class TileConfigM64(TileConfig):
    """How a GEMM is divided; here each warp of a thread block has n16 columns of its own.

    The defaults were fastest on an H200 (`benchmarks.matrices`).
    """

    warp_tiles: int = 1
    stages: int = 3  # of the thread block's cp.async ring
    min_blocks: int = 2  # resident thread blocks of an SM
    split_k: int = 0  # into how many stretches the inputs are cut; 0: as many as are fastest by `_best_split`


def m64_defines(
    variant: KernelVariant,
    rows: int,
    config: TileConfigM64,
    split_k: int,
    in_prepacked: bool = False,
    out_prepacked: bool = False,
) -> dict[str, int]:
    """The -D constants of gemm_m64.cu."""
    return {
        **variant.defines(rows, config),
        "MIN_BLOCKS": config.min_blocks,
        "SPLIT_K": split_k,
        **chain_defines(in_prepacked, out_prepacked),
        **sizeof_defines(SplitKWorkspace=_SplitKWorkspace),
    }


class GemmM64:
    """The same GEMM as a `GemmM16`, for more rows."""

    def __init__(self, gemm: GemmM16, config: TileConfigM64 | None = None) -> None:
        self.gemm, self.modules = gemm, gemm.modules
        self.output_widths = gemm.output_widths
        if gemm.variant.separate_perm:
            raise Unsupported("two matrices under one nonlinearity whose inputs are ordered differently")
        self.config = self._fit(config or default_config(gemm))
        self._group_tiles = self.config.warp_tiles * self.config.warps // (2 if gemm.variant.act else 1)
        self._groups = [-(-weight.n_tiles // self._group_tiles) for weight in gemm.weights]
        """Groups of outputs of each weight; SPLIT_K thread blocks work on each."""
        groups = self._groups[0] if gemm.variant.act else sum(self._groups)
        self.split_k = self.config.split_k or self._best_split(groups)
        self.arrivals = torch.zeros(groups, dtype=torch.int32, device=gemm.device)
        """Of each group, the counter of split_k_barrier."""

    def __call__(
        self,
        x: Tensor | PackedActs,
        out: Sequence[Tensor],
        residual: Tensor | None = None,
        packed_out: PackedActs | None = None,
    ) -> None:
        """As GemmM16, for up to 64 rows."""
        rows, config, packed_in = len(x), self.config, x if isinstance(x, PackedActs) else None
        if not 1 <= rows <= MAX_M64:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {MAX_M64}")
        padded_rows = _padded(rows)
        params, groups = self.gemm.params(x, out, residual, self._groups)
        blocks = groups * self.split_k
        sums = blocks * config.warps * config.warp_tiles * TILE_N * padded_rows if self.split_k > 1 else 0
        partial_sums = torch.empty(sums, dtype=torch.float32, device=self.gemm.device)
        module = self.modules.module(SOURCE, **self.defines(rows, packed_in is not None, packed_out is not None))
        kept = () if packed_in is not None else self.gemm.pack_activations(module, params, rows, padded_rows)
        workspace = _SplitKWorkspace(partial_sums.data_ptr(), self.arrivals.data_ptr())
        smem, pdl = self._launch_smem(rows, blocks)
        args = params, workspace, chain_args(packed_in, packed_out)
        cooperative = self.split_k > 1  # the split-K barrier needs all thread blocks resident
        module.launch("gemm_m64", (blocks, 1, 1), config.warps * 32, smem, args, pdl, cooperative)
        del kept, partial_sums  # freed after the launch

    @property
    def num_partials(self) -> int:
        """Partial sums of squares that the epilogue leaves for a row: one for at most 128 outputs."""
        return sum(self._groups[: len(self.output_widths)]) * max(1, self._group_tiles * TILE_N // 128)

    def defines(self, rows: int, in_prepacked: bool = False, out_prepacked: bool = False) -> dict[str, int]:
        """The -D constants of gemm_m64.cu for so many rows."""
        variant, padded_rows = self.gemm.variant, _padded(rows)
        return m64_defines(variant, padded_rows, self.config, self.split_k, in_prepacked, out_prepacked)

    def _best_split(self, groups: int) -> int:
        """The split-K factor with which the busiest SM is done soonest, the reduction included."""
        k_tiles, num_sms = self.gemm.weights[0].k_tiles, self.modules.num_sms

        def cost(splits: int) -> float:
            neighbours = -(-groups * splits // num_sms) - 1
            return -(-k_tiles // splits) * (1 + _CROWD_COST * neighbours) + (splits > 1) * _REDUCE_COST

        resident = num_sms * self.config.min_blocks  # the splits wait for each other, so all must be resident
        return min((n for n in _SPLITS if n == 1 or (n <= k_tiles and groups * n <= resident)), key=cost)

    def _smem_bytes(self, padded_rows: int, config: TileConfigM64) -> int:
        """Dynamic shared memory: the ring of weight tiles and activations, later the sums; the epilogue's tables."""
        tiles = config.warp_tiles * config.warps
        ring = config.stages * (tiles * self.gemm.variant.max_tile_bytes + padded_rows * TILE_K * 2)
        output_tiles = tiles // 2 if self.gemm.variant.act else tiles
        sums = padded_rows * (tiles * TILE_N + 8) * 4
        return max(ring, sums) + epilogue_smem_bytes(output_tiles * TILE_N, padded_rows)

    def _launch_smem(self, rows: int, blocks: int) -> tuple[int, bool]:
        """Dynamic shared memory, and whether to launch with PDL."""
        smem = self._smem_bytes(_padded(rows), self.config)
        if blocks > _MAX_EARLY_BLOCKS * self.modules.num_sms:
            return smem, False
        return balance_occupancy(self.modules, blocks, smem), True

    def _fit(self, config: TileConfigM64) -> TileConfigM64:
        """The configuration, reduced until shared memory suffices for 64 rows: all numbers of rows use the same."""
        if self.gemm.variant.act:
            config = replace(config, warp_tiles=max(2, config.warp_tiles // 2 * 2))
        max_smem = self.modules.max_smem
        while (self._smem_bytes(MAX_M64, config) + RESERVED_SMEM) * config.min_blocks > max_smem + RESERVED_SMEM:
            if config.min_blocks > 1:
                config = replace(config, min_blocks=config.min_blocks - 1)
            elif config.stages > 2:
                config = replace(config, stages=config.stages - 1)
            elif config.warps > 1:
                config = replace(config, warps=config.warps // 2)
            else:
                raise Unsupported(f"{max_smem} bytes of shared memory are too few")
        return config


class GemmDispatch:
    """A GEMM for up to 64 rows: 16 at a time, or with `use_m64` all at once."""

    def __init__(self, gemm: GemmM16, use_m64: bool) -> None:
        self.gemm = gemm
        self._m64 = GemmM64(gemm) if use_m64 and not gemm.variant.separate_perm else None

    def kernel(self, rows: int) -> GemmM16 | GemmM64 | None:
        """What multiplies so many rows in one launch; None if nothing does."""
        return self.gemm if rows <= MAX_M16 else self._m64

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill `out`, the GEMM's `empty_outputs`, with x (rows, inputs) @ each weight + residual."""
        if (kernel := self.kernel(len(x))) is not None:
            return kernel(x, out, residual)
        for start in range(0, len(x), MAX_M16):
            part = slice(start, start + MAX_M16)
            rest = None if residual is None else residual.reshape(len(x), -1)[part]
            self.gemm(x[part], [one[part] for one in out], rest)


def default_config(gemm: GemmM16) -> TileConfigM64:
    """The fastest on an H200: small thread blocks where large ones would divide unevenly among the SMs."""
    large, num_sms = TileConfigM64(), gemm.modules.num_sms
    if gemm.variant.act:
        blocks = -(-gemm.weights[0].n_tiles // large.warps)
        waves = -(-blocks // num_sms)
        uneven = waves > 1 and blocks < _MIN_SM_SHARE * waves * num_sms
        return TileConfigM64(2, 4, 2, 4) if uneven else large
    small = TileConfigM64(1, 4, 3, 4)
    enough = sum(weight.n_tiles for weight in gemm.weights) >= small.warps * num_sms
    return small if enough and len(gemm.weights) > 1 else large


def _padded(rows: int) -> int:
    """Rows that are computed: a multiple of 16, so that few kernels serve all numbers of rows."""
    return -(-rows // 16) * 16
