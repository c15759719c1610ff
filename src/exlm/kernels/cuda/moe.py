"""Mixture of experts from packed weights (moe.cu). The router's top-k runs on the device; the host does not wait.

Few tokens are multiplied straight from codes, by a kernel that finds each expert's weights in a table; a token's
output is the same bits in any batch. So are many tokens of small experts. For many tokens of large experts the
weights are dequantised, and the host must know how many tokens each expert has: it waits once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import spec
from .. import interface as b
from .gemm_m16 import GemmM16, TileConfig, row_smem_bytes
from .module_cache import ModuleCache, sizeof_defines
from .tuning import default_config
from .weight_tile import TILE_K, MmaWeight

SOURCE = Path(__file__).with_name("csrc") / "moe.cu"
MIN_EXPERTS_PER_PAIR = 4
"""Experts for each (token, expert) pair from which on hardly any two pairs share an expert."""

MAX_MOE_GEMM_WORK = 2**31
"""Rows of an expert times its bytes up to which it is multiplied straight from codes, which reads all of them for every
eight rows; above, it is dequantised."""

_MOE_BLOCK = 8  # rows that are multiplied at once
_MAX_PAIRS = 2048  # that moe_align sorts in one launch
_THREADS = 256
_PARAMS_BYTES = 256  # of shared memory, for GemmParams


class _SortedPair(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("expert", "token", "first", "rows"))


class _MoeParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("operands", "expert_bits", "logits", "bias", "x", "y")),
        *((name, ctypes.c_void_p) for name in ("packed_x", "sorted_pairs", "blocks")),
        *((name, ctypes.c_int) for name in ("inputs", "outputs", "row_words", "pairs")),
    )


class Routing(NamedTuple):
    """How a router's logits select experts, besides how many."""

    sigmoid: bool = False  # scores are sigmoids of the logits; else softmax
    bias: Tensor | None = None  # (experts,) float32: added to sigmoids where they are compared


SOFTMAX = Routing()


def moe_defines(experts: int, active: int, runtime_bits: int = 0, sigmoid: bool = False) -> dict[str, int]:
    """The -D constants of moe.cu, besides those of gemm_m16.h."""
    sizes = sizeof_defines(SortedPair=_SortedPair, MoeParams=_MoeParams)
    constants = {"NUM_EXPERTS": experts, "TOP_K": active, "RUNTIME_BITS": runtime_bits, "SIGMOID_ROUTING": int(sigmoid)}
    return {**constants, **sizes}


class AlignedPairs(NamedTuple):
    """(token, expert) pairs sorted by expert; a pair's place there is its row of the experts' inputs and outputs."""

    sorted_pairs: Tensor  # (pairs, 4) int32: moe.cu's SortedPair
    row_of_pair: Tensor  # (pairs,) int32
    blocks: Tensor  # int32: the first row of each block of up to _MOE_BLOCK rows of one expert, then -1


class _ExpertGemm(GemmM16):
    """The GEMM of one expert; its GemmParams are in shared memory, before all else."""

    def smem_bytes(self, rows: int, config: TileConfig, in_prepacked: bool = False) -> int:
        return super().smem_bytes(rows, config, in_prepacked) + _PARAMS_BYTES


class MoeGemm:
    """One GEMM of every expert. With `act` each has two weights, and the output is act(first) · second."""

    def __init__(
        self,
        modules: ModuleCache,
        experts: Sequence[Sequence[MmaWeight]],
        active: int,
        act: str | None = None,
        routing: Routing = SOFTMAX,
    ) -> None:
        self._modules = modules
        self._bias = routing.bias
        self._gemms = [_ExpertGemm(modules, weights, None, act) for weights in experts]
        self._active = active
        self._defines = moe_defines(len(experts), active, self._unify_variants(), routing.sigmoid)
        self._largest = max(self._gemms, key=lambda gemm: gemm.smem_bytes(1, TileConfig()))
        """Its configuration serves all experts."""
        active_weights = [weight for weights in experts[:active] for weight in weights]
        self._largest.config = self._largest.fit(default_config(active_weights, act, modules.num_sms))
        device = self._largest.device
        operands = bytearray(b"".join(bytes(gemm.operands) for gemm in self._gemms))
        self._operands = torch.frombuffer(operands, dtype=torch.uint8).to(device)
        bits = [sum(weight.layout.bits << 4 * i for i, weight in enumerate(weights)) for weights in experts]
        self._expert_bits = torch.tensor(bits, dtype=torch.int32, device=device)
        self.width = self._largest.output_widths[0]
        self.nbytes = sum(weight.nbytes for weights in experts for weight in weights)

    def _unify_variants(self) -> int:
        """Give all experts one kernel variant; if their widths differ, that of the widest, and RUNTIME_BITS."""
        variants, runtime_bits = [gemm.variant for gemm in self._gemms], 0
        layouts = variants[0].layouts
        if len({variant.layouts for variant in variants}) > 1:
            every = [layout for variant in variants for layout in variant.layouts]
            layouts = (max(every, key=lambda layout: layout.bits),) * len(layouts)
            runtime_bits = sum(1 << bits for bits in {layout.bits for layout in every})
        separate_perm = any(variant.separate_perm for variant in variants)
        for gemm in self._gemms:
            gemm.variant = replace(gemm.variant, layouts=layouts, separate_perm=separate_perm)
        return runtime_bits

    def module(self, rows: int) -> Any:
        """The kernels for single rows (1) or for blocks of rows."""
        return self._modules.module(SOURCE, **self._largest.defines(rows), **self._defines)

    def __call__(self, x: Tensor, logits: Tensor, aligned: AlignedPairs | None) -> Tensor:
        """(pairs, outputs), with `aligned` in its order; x is (tokens, inputs) with `act`, else like the output.

        All are contiguous float16, and so are the logits, (tokens, experts).
        """
        largest, pairs = self._largest, len(logits) * self._active
        out = x.new_empty(pairs, self.width)
        params = _MoeParams(*(one.data_ptr() for one in (self._operands, self._expert_bits, logits)))
        params.bias = None if self._bias is None else self._bias.data_ptr()
        params.x, params.y = x.data_ptr(), out.data_ptr()
        params.inputs, params.outputs, params.pairs = largest.in_features, self.width, pairs
        params.row_words = largest.k_tiles * TILE_K // 8
        rows, blocks, kept = 1, pairs, None
        if aligned is not None:
            rows, blocks = _MOE_BLOCK, len(aligned.blocks)
            params.sorted_pairs, params.blocks = aligned.sorted_pairs.data_ptr(), aligned.blocks.data_ptr()
            kept = self._pack_activations(params)
        config = largest.config
        block_tiles = config.warp_tiles // 2 if largest.variant.act else config.warp_tiles
        grid = -(-largest.weights[0].n_tiles // block_tiles), blocks, 1
        smem = largest.smem_bytes(rows, config)
        self.module(rows).launch("moe_gemm", grid, config.warps * 32, smem, (params,))
        del kept  # freed after the launch
        return out

    def _pack_activations(self, params: _MoeParams) -> Tensor:
        """Launch moe_pack_activations, and set `packed_x` of `params`."""
        largest, perms = self._largest, 2 if self._largest.variant.separate_perm else 1
        numbers = perms * params.pairs * params.row_words * 8
        packed_x = torch.empty(numbers, dtype=torch.float16, device=largest.device)
        params.packed_x = packed_x.data_ptr()
        grid = params.pairs, -(-params.row_words // _THREADS), perms
        smem = _PARAMS_BYTES + row_smem_bytes(largest.in_features)
        self.module(_MOE_BLOCK).launch("moe_pack_activations", grid, _THREADS, smem, (params,))
        return packed_x


class CudaMoe:
    """Routes each token to its experts, and adds their outputs in the order of selection."""

    def __init__(
        self,
        moe: spec.Moe,
        gate_up: MoeGemm,
        down: MoeGemm,
        linears: Sequence[Sequence[b.LinearFn]],
        gated: b.GatedActivationFn,
        bias: Tensor | None = None,
    ) -> None:
        """`linears`: gate, up and down of every expert, for the tokens that are not multiplied straight from codes."""
        self._moe = moe
        self._gate_up, self._down = gate_up, down
        self._linears, self._gated, self._bias = linears, gated, bias

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat, scores = x.flatten(0, 1).contiguous(), logits.flatten(0, 1).to(x.dtype).contiguous()
        if not self._uses_moe_gemm(len(flat)):
            return self._run_dequantized(flat, scores).view_as(x)
        chunk = max(b.FUSE_MAX_TOKENS, _MAX_PAIRS // self._moe.active)
        chunks = [slice(start, start + chunk) for start in range(0, len(flat), chunk)]
        parts = [self._run_moe_gemm(flat[part], scores[part]) for part in chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(x)

    def _uses_moe_gemm(self, tokens: int) -> bool:
        """Whether so many tokens are multiplied straight from codes."""
        expert_bytes = (self._gate_up.nbytes + self._down.nbytes) / self._moe.experts
        rows = tokens * self._moe.active / self._moe.experts
        return tokens <= b.FUSE_MAX_TOKENS or rows * expert_bytes <= MAX_MOE_GEMM_WORK

    def _run_moe_gemm(self, x: Tensor, logits: Tensor) -> Tensor:
        single = len(x) == 1 or len(x) * self._moe.active * MIN_EXPERTS_PER_PAIR <= self._moe.experts
        aligned = None if single else self._align(logits)
        expert_out = self._down(self._gate_up(x, logits, aligned), logits, aligned)
        return self._combine(expert_out, logits, None if aligned is None else aligned.row_of_pair, True)

    def _run_dequantized(self, x: Tensor, logits: Tensor) -> Tensor:
        """Expert by expert; the host waits once, for the number of tokens of each."""
        active, experts = self._moe.active, self._moe.experts
        selected = torch.empty(len(x) * active, dtype=torch.int32, device=x.device)
        args = _pointer(logits), _pointer(self._bias), _pointer(selected), ctypes.c_int(len(x))
        self._down.module(1).launch("topk", (-(-len(x) // 8), 1, 1), _THREADS, 0, args, pdl=False)
        sorted_experts, order = selected.sort(stable=True)
        numbers = torch.arange(experts, dtype=torch.int32, device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True).tolist()
        rows = x.index_select(0, order // active)
        outputs = []
        for start, end, gate, up, down in zip([0, *ends[:-1]], ends, *self._linears, strict=True):
            if start < end:
                part = rows[start:end]
                outputs.append(down(self._gated(gate(part), up(part))))
        return self._combine(torch.cat(outputs), logits, order.argsort().int(), False)

    def _align(self, logits: Tensor) -> AlignedPairs:
        """Sort all (token, expert) pairs by expert."""
        pairs, device = len(logits) * self._moe.active, logits.device
        max_blocks = min(pairs, self._moe.experts + pairs // _MOE_BLOCK)  # each expert may have one that is not full
        sizes = (pairs, len(_SortedPair._fields_)), (pairs,), (max_blocks,)
        aligned = AlignedPairs(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
        args = *map(_pointer, (logits, self._bias, *aligned)), ctypes.c_int(pairs), ctypes.c_int(max_blocks)
        smem = 4 * (pairs + self._moe.experts)
        self._gate_up.module(_MOE_BLOCK).launch("moe_align", (1, 1, 1), _THREADS, smem, args)
        return aligned

    def _combine(self, expert_out: Tensor, logits: Tensor, row_of_pair: Tensor | None, pdl: bool) -> Tensor:
        """The outputs of each token's experts times their routing weights, added up."""
        out = expert_out.new_empty(len(logits), self._down.width)
        args = (
            *map(_pointer, (logits, self._bias, expert_out, row_of_pair, out)),
            ctypes.c_int(self._down.width),
            ctypes.c_int(self._moe.renormalize),
            ctypes.c_float(self._moe.weight_scale),
        )
        grid = len(logits), -(-self._down.width // (8 * _THREADS)), 1
        self._down.module(1).launch("combine", grid, _THREADS, 0, args, pdl)
        return out


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
