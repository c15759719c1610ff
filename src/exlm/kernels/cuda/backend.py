"""The CUDA backend, in float16: packed weights, experts made of them, attention of few new tokens, recurrent mixers.

Few rows are multiplied straight from codes; for many, the weight is dequantised and multiplied by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import spec
from ...errors import MissingExtra, Unsupported
from ...formats import DenseWeight, PackedWeight, Weight
from .. import interface as b
from ..reference import ReferenceBackend
from .attention import HEAD_DIMS, PagedDecodeAttention, SplitCounters
from .dense import CudaDense, CudaFusedDense, dense_linear
from .dequantize import DequantGemm, Dequantizer, dequant_gemms
from .fused_layer import CudaFusedLayer, MixerCore, MixThenPack, PackingAttention, fuse_layer_kernels
from .gemm_m16 import ACTIVATIONS, RmsNorm
from .gemm_m64 import MAX_M64, GemmDispatch
from .module_cache import ModuleCache, bindings
from .moe import CudaMoe, MoeGemm, Routing
from .recurrent import CudaDeltaNet, CudaMamba2, CudaShortConv
from .repack import GpuRepacker, repack
from .tuning import GemmShape, TuneCache, tuned_file
from .weight_tile import MmaWeight, unify_groups


class CudaLinear:
    """x @ W + bias for any number of rows."""

    def __init__(self, tune_cache: TuneCache, weight: MmaWeight, use_m64: bool) -> None:
        self._tune_cache = tune_cache
        self._use_m64 = use_m64
        self.set_weight(weight)

    def set_weight(self, weight: MmaWeight) -> None:
        """Use this weight: the same numbers in another layout."""
        self.weight = weight
        self.dequantizer = Dequantizer(self._tune_cache.modules, weight)
        self.gemm = GemmDispatch(self._tune_cache.gemm([weight]), self._use_m64)
        self._dequant_gemm = DequantGemm([self.dequantizer])

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > MAX_M64:
            (y,) = self._dequant_gemm(rows)
        else:
            (y,) = out = self.gemm.gemm.empty_outputs(len(rows))
            self.gemm(rows.contiguous(), out)
        return y.view(*x.shape[:-1], self.weight.out_features)


class CudaFusedLinear(b.FusedLinear):
    """Weights that share an input, in one launch, with a norm before and a residual or activation after."""

    def __init__(self, gemm: GemmDispatch, linears: Sequence[CudaLinear]) -> None:
        self.gemm = gemm
        self._dequant_gemms = dequant_gemms([linear.dequantizer for linear in linears])

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each."""
        shape, rows = x.shape[:-1], x.reshape(-1, x.shape[-1]).contiguous()
        out = self.gemm.gemm.empty_outputs(len(rows))
        self.gemm(rows, out, residual)
        return [y.view(*shape, -1) for y in out]

    def fuse_layer(
        self,
        attend: b.AttentionFn,
        norm: b.QKNormFn | None,
        o: b.FusedLinear,
        gate_up: b.FusedLinear,
        down: b.FusedLinear,
    ) -> CudaFusedLayer | None:
        """The whole layer; None if a part of it belongs to another backend."""
        if not isinstance(attend, PagedDecodeAttention):
            return None
        return self._fuse_layer(PackingAttention(attend, norm), o, gate_up, down)

    def fuse_layer_around(
        self, mix: b.MixFn, o: b.FusedLinear, gate_up: b.FusedLinear, down: b.FusedLinear
    ) -> CudaFusedLayer | None:
        """The whole layer; None if a part of it belongs to another backend."""
        return self._fuse_layer(MixThenPack(self.gemm.gemm.modules, mix), o, gate_up, down)

    def _fuse_layer(self, mixer: MixerCore, *others: b.FusedLinear) -> CudaFusedLayer | None:
        own = [one.gemm for one in others if isinstance(one, CudaFusedLinear)]
        if len(own) < 3:
            return None
        o, gate_up, down = own
        return fuse_layer_kernels((self.gemm, o, gate_up, down), mixer)

    def unfused(self, x: Tensor) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each, of many rows, without norm, residual and activation."""
        rows = x.reshape(-1, x.shape[-1])
        return [y.view(*x.shape[:-1], y.shape[1]) for gemm in self._dequant_gemms for y in gemm(rows)]


class CudaBackend:
    """Packed weights, experts, attention of few tokens and recurrent mixers on one GPU; all else is declined."""

    name = "cuda"
    max_fused_tokens = b.FUSE_MAX_TOKENS

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        folder: Path,
        fallback: b.Backend | None = None,
        use_m64: bool = False,
    ) -> None:
        """`fallback` attends to many new tokens, by default in plain torch. `use_m64`: gemm_m64 for 17 to 64 rows."""
        if dtype is not torch.float16:
            raise Unsupported(f"computes in float16, not in {str(dtype).removeprefix('torch.')}")
        try:
            bindings()
        except MissingExtra as reason:
            raise Unsupported(str(reason)) from reason
        self.device = device
        self.dtype = dtype
        self._fallback = fallback or ReferenceBackend(device, dtype)
        self._modules = ModuleCache(device, folder)
        self._tune_cache = TuneCache(self._modules, tuned_file(folder, torch.cuda.get_device_name(device)))
        self._repacker = GpuRepacker(self._modules)
        self._use_m64 = use_m64
        self._counters = SplitCounters(self._modules, self._modules.num_sms)

    def linear(self, weight: Weight) -> b.LinearFn:
        """Packed weights, repacked; dense ones with few outputs."""
        if isinstance(weight, DenseWeight):
            return dense_linear(self._modules, weight)
        if not isinstance(weight, PackedWeight):
            raise Unsupported("only packed matrices")
        return CudaLinear(self._tune_cache, repack(weight, self._repacker), self._use_m64)

    def fused_linear(
        self,
        linears: Sequence[b.LinearFn],
        prologue: b.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> b.FusedLinear:
        """Packed weights in one layout, or dense ones with few outputs."""
        if act is not None and act not in ACTIVATIONS:
            raise Unsupported(f"{act} between matrices")
        if prologue is not None and (prologue.norm.kind != "rms" or prologue.norm.bias):
            raise Unsupported("a norm with a mean or a bias")
        norm = None if prologue is None else RmsNorm(prologue.weight + prologue.norm.offset, prologue.norm.eps)
        dense = [linear for linear in linears if isinstance(linear, CudaDense)]
        if len(dense) == len(linears) and act is None and not fp32_out:
            return CudaFusedDense(self._modules, dense, norm)
        own = [linear for linear in linears if isinstance(linear, CudaLinear)]
        if len(own) < len(linears):
            raise Unsupported("matrices that are not packed")
        if len(own) == 1 and norm is None and act is None and not fp32_out:
            return CudaFusedLinear(own[0].gemm, own)
        weights = unify_groups([linear.weight for linear in own])
        gemm = self._tune_cache.gemm(weights, norm, act, fp32_out)
        _share_layout(own, weights)
        return CudaFusedLinear(GemmDispatch(gemm, self._use_m64), own)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Few new tokens here, many by the fallback."""
        if attn.head_dim not in HEAD_DIMS:
            raise Unsupported(f"heads of {attn.head_dim} numbers, only of {', '.join(map(str, HEAD_DIMS))}")
        return PagedDecodeAttention(self._counters, attn, rope, self._fallback.attention(attn, rope))

    def moe(
        self,
        moe: spec.Moe,
        gate: list[b.LinearFn],
        up: list[b.LinearFn],
        down: list[b.LinearFn],
        selection_bias: Tensor | None = None,
    ) -> b.MoeFn:
        """Packed experts, those of a layer in one layout."""
        if moe.routing_groups > 1 or (moe.routing == "softmax" and selection_bias is not None):
            raise Unsupported("routing by groups of experts, or by a softmax with a bias")
        if not moe.gated:
            raise Unsupported("experts without gates")
        own = [linear for linear in (*gate, *up, *down) if isinstance(linear, CudaLinear)]
        if len(own) < 3 * moe.experts:
            raise Unsupported("experts that are not packed")
        if moe.act not in ACTIVATIONS:
            raise Unsupported(f"{moe.act} between matrices")
        weights = [linear.weight for linear in own]
        gate_up_weights = unify_groups(weights[: 2 * moe.experts])
        down_weights = unify_groups(weights[2 * moe.experts :])
        pairs = list(zip(gate_up_weights[: moe.experts], gate_up_weights[moe.experts :], strict=True))
        bias = None if selection_bias is None else selection_bias.to(self.device, torch.float32).contiguous()
        routing = Routing(moe.routing == "sigmoid", bias)
        gate_up_gemm = MoeGemm(self._modules, pairs, moe.active, moe.act, routing)
        down_gemm = MoeGemm(self._modules, [(weight,) for weight in down_weights], moe.active, routing=routing)
        _share_layout(own, (*gate_up_weights, *down_weights))
        return CudaMoe(moe, gate_up_gemm, down_gemm, (gate, up, down), self._fallback.gated(moe.act), bias)

    def delta_net(self, mixer: spec.DeltaNet, params: b.DeltaNetParams) -> b.DeltaNetFn:
        """One launch for few tokens, three for many."""
        return CudaDeltaNet(self._modules, mixer, params)

    def mamba2(self, mixer: spec.Mamba2, params: b.Mamba2Params) -> b.Mamba2Fn:
        """One launch for few tokens, three for many."""
        return CudaMamba2(self._counters, mixer, params)

    def short_conv(self, mixer: spec.ShortConv, conv: Tensor, bias: Tensor | None) -> b.ShortConvFn:
        """One launch."""
        return CudaShortConv(self._modules, mixer, conv, bias)

    def tune_spaces(self, run: Callable[[], object]) -> list[GemmShape]:
        """The shapes of the GEMMs that `run` launches."""
        return self._tune_cache.shapes_used(run)

    def save_tuned(self, spaces: Sequence[b.TuneSpace]) -> Path | None:
        """Store their configurations."""
        return self._tune_cache.save([space for space in spaces if isinstance(space, GemmShape)])

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("only packed matrices, experts, attention and recurrent mixers")

    embedding = norm = add_norm = activation = gated = rope = _declined


def _share_layout(linears: Sequence[CudaLinear], weights: Sequence[MmaWeight]) -> None:
    """Let linears use the weights of the fused GEMM, so that each weight is in memory once."""
    for linear, weight in zip(linears, weights, strict=True):
        if weight.layout != linear.weight.layout:
            linear.set_weight(weight)
