"""GEMM of packed weights with 1 to 16 rows of activations (gemm_m16.cu): one launch for weights that share an input.

All of 1 to 16 rows are summed in the same order, so a row's output is the same bits in any such batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from .module_cache import CudaModule, ModuleCache, ModuleSource, sizeof_defines
from .prepacked_acts import (
    MAX_M16,
    NO_SLOT,
    ChainArgs,
    InputLayout,
    PackedActs,
    as_uint16,
    chain_args,
    chain_defines,
    epilogue_smem_bytes,
    fragment_order,
)
from .weight_tile import TILE_K, TILE_N, MmaWeight, TileLayout, WeightParams, slot_inputs, tile_defines

SOURCE = Path(__file__).with_name("csrc") / "gemm_m16.cu"
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
"""Activations that the epilogue applies, as its ACTIVATION."""

MAX_WEIGHTS = 4
"""Weights of one launch; `BITS` has a digit for each."""

RESERVED_SMEM = 1024
"""Bytes of shared memory that a device reserves in each thread block."""

_PACK_THREADS = 256
_SMEM_CASES = (1, False), (MAX_M16, False), (MAX_M16, True)  # rows, prepacked: those that need the most shared memory


class GemmOperand(ctypes.Structure):
    """The kernels' `GemmOperand`."""

    _fields_ = (
        ("weight", WeightParams),
        *((name, ctypes.c_void_p) for name in ("perm", "norm_weight", "packed_x", "bias", "y")),
        *((name, ctypes.c_int) for name in ("outputs", "stride", "first_block")),
    )


@cache
def gemm_params_type(num_weights: int) -> type[ctypes.Structure]:
    """The kernels' `GemmParams` for so many weights."""
    fields = (
        ("operands", GemmOperand * num_weights),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("inputs", ctypes.c_int),
    )
    return type("GemmParams", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class TileConfig:
    """How a GEMM is divided among thread blocks and warps."""

    warp_tiles: int = 2  # n16 columns that a warp multiplies at a time
    warps: int = 8  # of a thread block; they share the inputs
    stages: int = 3  # of each warp's cp.async ring


class RmsNorm(NamedTuple):
    """An RMS norm that is applied to x first."""

    weight: Tensor  # (inputs) float32
    eps: float


@dataclass(frozen=True)
class KernelVariant:
    """What a kernel is compiled for, besides its tile configuration and number of rows."""

    layouts: tuple[TileLayout, ...]  # of each weight; they differ in nothing but the bits
    norm: bool = False
    act: int = 0  # see ACTIVATIONS; 0: none
    separate_perm: bool = False  # gate and up have permutations of their own
    fp32_out: bool = False

    def defines(self, rows: int, config: TileConfig) -> dict[str, int]:
        """The -D constants of pack_activations.h and weight_tile.h, for up to `rows` rows."""
        return {
            **tile_defines(self.layouts),
            "N8_TILES": -(-rows // 8),
            "WARP_TILES": config.warp_tiles,
            "WARPS": config.warps,
            "STAGES": config.stages,
            "RMS_NORM": int(self.norm),
            "ACTIVATION": self.act,
            "FP32_OUT": int(self.fp32_out),
            **sizeof_defines(GemmParams=gemm_params_type(len(self.layouts)), ChainArgs=ChainArgs),
        }

    def m16_defines(self, rows: int, config: TileConfig, pack_items: int = 0) -> dict[str, int]:
        """Those of gemm_m16.h; a thread packs `pack_items` units of the one row, or pack_activations has done it."""
        return {
            **self.defines(rows, config),
            "SEPARATE_PERM": int(self.separate_perm),
            "FUSED_PACK": int(pack_items > 0),
            "PACK_ITEMS": max(1, pack_items),
        }

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of shared memory that hold any tile of the launch: MAX_TILE_BYTES."""
        return max(layout.max_tile_bytes for layout in self.layouts)


class GemmM16:
    """Weights that are multiplied by the same rows in one launch.

    With `act` there are two, and the output is act(first) · second. With `fp32_out` it is in float32.
    """

    def __init__(
        self,
        modules: ModuleCache,
        weights: Sequence[MmaWeight],
        norm: RmsNorm | None = None,
        act: str | None = None,
        config: TileConfig | None = None,
        fp32_out: bool = False,
    ) -> None:
        self.modules = modules
        self.weights = tuple(weights)
        self.in_features, self.device = weights[0].in_features, weights[0].device
        if len(weights) > MAX_WEIGHTS:
            raise Unsupported(f"{len(weights)} matrices in a launch, at most {MAX_WEIGHTS}")
        if self.in_features % 8 or self.in_features >= NO_SLOT:
            raise Unsupported(f"{self.in_features} inputs, which the kernels want in eights and below {NO_SLOT}")
        inputs = [slot_inputs(weight) for weight in weights]
        self._perm_owners = _perm_owners(weights, inputs)
        """For each weight, the first one that reads the same packed activations."""
        separate_perm = act is not None and len(set(self._perm_owners)) > 1
        layouts = tuple(weight.layout for weight in weights)
        act_number = ACTIVATIONS[act] if act else 0
        self.variant = KernelVariant(layouts, norm is not None, act_number, separate_perm, fp32_out)
        self._norm = norm
        self.k_tiles = max(weight.k_tiles for weight in weights)
        self.config = self.fit(config or TileConfig())
        self.launches = 0
        perms = {owner: _input_perm(weights[owner], inputs[owner], norm) for owner in set(self._perm_owners)}
        self._perms = [perms[owner] for owner in self._perm_owners]  # keeps the tensors of `operands` alive
        self.operands = (GemmOperand * len(weights))()
        """The weights as kernels take them, without addresses of inputs and outputs."""
        for i, (weight, (perm, norm_weight)) in enumerate(zip(self.weights, self._perms, strict=True)):
            self.operands[i] = GemmOperand(
                weight=weight.params(),
                perm=_address(perm),
                norm_weight=_address(norm_weight),
                bias=_address(weight.bias),
                outputs=weight.out_features,
            )

    @property
    def output_widths(self) -> tuple[int, ...]:
        """Numbers in a row of each output."""
        widths = tuple(weight.out_features for weight in self.weights)
        return widths[:1] if self.variant.act else widths

    def empty_outputs(self, rows: int) -> list[Tensor]:
        """Memory for the outputs of so many rows, side by side in one tensor if all begin at 16 bytes."""
        dtype = torch.float32 if self.variant.fp32_out else torch.float16
        widths = self.output_widths
        if len(widths) == 1 or any(width % 8 for width in widths):
            return [torch.empty(rows, width, dtype=dtype, device=self.device) for width in widths]
        return list(torch.empty(rows, sum(widths), dtype=dtype, device=self.device).split_with_sizes(widths, 1))

    @cached_property
    def input_layout(self) -> InputLayout:
        """Where a kernel may write this GEMM's input; `Unsupported` if inputs have too many slots."""
        return InputLayout(self.weights, self._perm_owners, None if self._norm is None else self._norm.weight)

    @property
    def num_partials(self) -> int:
        """Partial sums of squares that the epilogue leaves for a row: one for each thread block."""
        return sum(self._blocks()[: len(self.output_widths)])

    def _blocks(self) -> list[int]:
        """Thread blocks of each weight."""
        return [-(-weight.n_tiles // self._block_tiles(self.config)) for weight in self.weights]

    def _block_tiles(self, config: TileConfig) -> int:
        """n16 columns of outputs of a thread block."""
        return config.warp_tiles // 2 if self.variant.act else config.warp_tiles

    def __call__(
        self,
        x: Tensor | PackedActs,
        out: Sequence[Tensor],
        residual: Tensor | None = None,
        packed_out: PackedActs | None = None,
    ) -> None:
        """Fill `out`, `empty_outputs` of as many rows, with x (rows, inputs) @ each weight + residual.

        x and the residual are contiguous and float16. With `packed_out` the output is also packed for the next
        GEMM; then `out` may be empty.
        """
        rows = len(x)
        self.launches += 1
        if not 1 <= rows <= MAX_M16:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {MAX_M16}")
        config, packed_in = self.config, x if isinstance(x, PackedActs) else None
        params, blocks = self.params(x, out, residual, self._blocks())
        module = self.modules.module(SOURCE, **self.defines(rows, packed_in is not None, packed_out is not None))
        kept = () if rows == 1 or packed_in is not None else self.pack_activations(module, params, rows, rows)
        smem = self.smem_bytes(rows, config, packed_in is not None)
        if packed_in is not None:
            smem = balance_occupancy(self.modules, blocks, smem)
        args = params, chain_args(packed_in, packed_out)
        module.launch("gemm_m16", (blocks, 1, 1), config.warps * 32, smem, args)
        del kept  # freed after the launch: later work on the stream may reuse the memory, earlier work may not

    def params(
        self, x: Tensor | PackedActs, out: Sequence[Tensor], residual: Tensor | None, blocks: Sequence[int]
    ) -> tuple[Any, int]:
        """`GemmParams`, without x packed by this GEMM; and the number of blocks, given those of each weight."""
        params = gemm_params_type(len(self.weights))(operands=self.operands, residual=_address(residual))
        if isinstance(x, PackedActs):
            for operand, address in zip(params.operands, x.addresses, strict=True):
                operand.packed_x = address
        else:
            params.x = x.data_ptr()
        params.eps = 0.0 if self._norm is None else self._norm.eps
        params.rows, params.inputs = len(x), self.in_features
        total = 0
        for i, count in enumerate(blocks):
            operand = params.operands[i]
            operand.stride, operand.first_block = operand.outputs, total
            if out:
                y = out[0] if self.variant.act else out[i]
                operand.y, operand.stride = y.data_ptr(), y.stride(0)
            total += 0 if self.variant.act and i else count
        return params, total

    def defines(self, rows: int, in_prepacked: bool = False, out_prepacked: bool = False) -> dict[str, int]:
        """The -D constants of gemm_m16.cu for so many rows."""
        pack_items = -(-self.k_tiles * 16 // (self.config.warps * 32)) if rows == 1 and not in_prepacked else 0
        return {
            **self.variant.m16_defines(rows, self.config, pack_items),
            **chain_defines(in_prepacked, out_prepacked),
        }

    def smem_bytes(self, rows: int, config: TileConfig, in_prepacked: bool = False) -> int:
        """Dynamic shared memory of a thread block: the ring and a single row before and after packing, later the sums.

        With prepacked rows, the epilogue's tables instead of the row.
        """
        ring = config.warps * config.stages * config.warp_tiles * self.variant.max_tile_bytes
        sums = config.warps * config.warp_tiles * TILE_N * 4
        if in_prepacked:
            padded_rows = -(-rows // 8) * 8
            epilogue = epilogue_smem_bytes(self._block_tiles(config) * TILE_N, padded_rows)
            return max(ring, sums * padded_rows) + epilogue
        packed_row = (2 if self.variant.separate_perm else 1) * self.k_tiles * TILE_K * 2
        row = row_smem_bytes(self.in_features) + 15 + packed_row if rows == 1 else 0
        return max(ring + row, sums * rows)

    def fit(self, config: TileConfig) -> TileConfig:
        """The configuration, reduced until shared memory suffices for 1 to 16 rows.

        All of them use the same one: the order of summation depends on its warps.
        """
        if self.variant.act:
            config = replace(config, warp_tiles=max(2, config.warp_tiles // 2 * 2))
        max_smem = self.modules.max_smem
        while max(self.smem_bytes(rows, config, prepacked) for rows, prepacked in _SMEM_CASES) > max_smem:
            if config.stages > 2:
                config = replace(config, stages=config.stages - 1)
            elif config.warps > 1:
                config = replace(config, warps=config.warps // 2)
            else:
                raise Unsupported(f"{max_smem} bytes of shared memory are too few for {self.in_features} inputs")
        return config

    def pack_activations(
        self, module: CudaModule, params: Any, rows: int, row_capacity: int, pdl: bool = True
    ) -> list[Tensor]:
        """Launch pack_activations once for each permutation, and set `packed_x` of `params`; the tensors it fills."""
        owners = list(dict.fromkeys(self._perm_owners))
        pack_params = type(params).from_buffer_copy(params)
        kept: list[Tensor] = []
        for i, owner in enumerate(owners):
            numbers = self.weights[owner].k_tiles * TILE_K * row_capacity
            packed_x = torch.empty(numbers, dtype=torch.float16, device=self.device)
            kept.append(packed_x)
            for operand, its_owner in zip(params.operands, self._perm_owners, strict=True):
                if its_owner == owner:
                    operand.packed_x = packed_x.data_ptr()
            pack_params.operands[i] = params.operands[owner]
        pack_params.rows = row_capacity
        k_tiles = max(self.weights[owner].k_tiles for owner in owners)
        grid = (rows, -(-k_tiles * 16 // _PACK_THREADS), len(owners))
        smem = row_smem_bytes(self.in_features)
        module.launch("pack_activations", grid, _PACK_THREADS, smem, (pack_params,), pdl)
        return kept


def balance_occupancy(modules: ModuleSource, blocks: int, smem: int) -> int:
    """Dynamic shared memory of a thread block, raised so that no SM takes more of them than an even share.

    With PDL thread blocks start while the kernel before still occupies some SMs, and would crowd the others.
    """
    blocks_per_sm = -(-blocks // modules.num_sms)
    return max(smem, (modules.max_smem + RESERVED_SMEM) // (blocks_per_sm + 1) - RESERVED_SMEM + 16)


def row_smem_bytes(inputs: int) -> int:
    """Bytes of shared memory for a row of x, ZERO_PAD behind it, and the sums of squares of each 256 numbers."""
    return (inputs + 8) * 2 + -(-inputs // 256) * 4


def _perm_owners(weights: Sequence[MmaWeight], inputs: Sequence[Tensor]) -> list[int]:
    """For each weight, the first one with the same inputs in its slots, and as many of them in fine tiles."""

    def same(i: int, j: int) -> bool:
        return weights[i].fine.k_tiles == weights[j].fine.k_tiles and torch.equal(inputs[i], inputs[j])

    return [next(j for j in range(i + 1) if same(j, i)) for i in range(len(weights))]


def _input_perm(weight: MmaWeight, inputs: Tensor, norm: RmsNorm | None) -> tuple[Tensor | None, Tensor | None]:
    """`InputPerm`: which input each packed number is, as uint16, and the norm's weight of it; None where in order."""
    if weight.perm is None and norm is None and weight.k_tiles == weight.k_blocks:
        return None, None
    ordered = fragment_order(inputs)
    perm = torch.where(ordered < 0, weight.in_features, ordered)  # padding: the zero behind the row
    uint16 = as_uint16(perm).to(weight.device, non_blocking=True)
    if norm is None:
        return uint16, None
    norm_weight = F.pad(norm.weight.float(), (0, 1))
    return uint16, norm_weight.index_select(0, perm.to(weight.device, non_blocking=True))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
