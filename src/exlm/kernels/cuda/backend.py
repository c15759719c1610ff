"""The CUDA backend: packed matrices, experts made of them and the attention of few tokens, in float16.

A few rows are multiplied straight from codes; for many, the matrix is unpacked and multiplied as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import spec
from ...errors import MissingExtra, Unsupported
from ...formats import PackedWeight, Weight
from .. import interface as b
from ..reference import ReferenceBackend
from .attention import HEAD_DIMS, PagedDecodeAttention, SplitCounters
from .dequantize import DequantGemm, Dequantizer, dequant_gemms
from .fused_layer import CudaFusedLayer, fuse_layer_kernels
from .gemm import ACTS, RmsNorm
from .gemm_dispatch import GemmDispatch
from .gemm_m64 import MOST
from .gpu_repack import GpuRepacker
from .module_cache import ModuleCache, bindings
from .moe import CudaMoe, ExpertGemm
from .repack import MmaWeight, repack, unify_groups
from .tuning import GemmShape, TuneCache, tuned_file


class CudaLinear:
    """x @ W + bias for any number of rows."""

    def __init__(self, tuned: TuneCache, tiles: MmaWeight, wide: bool) -> None:
        self._tuned = tuned
        self._wide = wide
        self.use(tiles)

    def use(self, tiles: MmaWeight) -> None:
        """Go on with the same numbers in another layout."""
        self.tiles = tiles
        self.dequantizer = Dequantizer(self._tuned.modules, tiles)
        self.product = GemmDispatch(self._tuned.product([tiles]), self._wide)
        self._many = DequantGemm([self.dequantizer])

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        (y,) = self._few(rows) if len(rows) <= MOST else self._many(rows)
        return y.view(*x.shape[:-1], self.tiles.out_features)

    def _few(self, rows: Tensor) -> list[Tensor]:
        out = self.product.answers(len(rows))
        self.product(rows.contiguous(), out)
        return out


class CudaFusedLinear(b.FusedLinear):
    """Several matrices in one launch, with what comes before and behind them."""

    def __init__(self, product: GemmDispatch, matrices: Sequence[CudaLinear]) -> None:
        self.product = product
        self._many = dequant_gemms([one.dequantizer for one in matrices])

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each."""
        shape, rows = x.shape[:-1], x.reshape(-1, x.shape[-1]).contiguous()
        out = self.product.answers(len(rows))
        self.product(rows, out, residual)
        return [one.view(*shape, -1) for one in out]

    def fuse_layer(
        self, attend: b.AttentionFn, norm: b.QKNormFn | None, o: b.FusedLinear, gate: b.FusedLinear, down: b.FusedLinear
    ) -> CudaFusedLayer | None:
        """The whole layer that these begin, if every part is of this kind."""
        if isinstance(o, CudaFusedLinear) and isinstance(gate, CudaFusedLinear) and isinstance(down, CudaFusedLinear):
            return fuse_layer_kernels((self.product, o.product, gate.product, down.product), attend, norm)
        return None

    def unfused(self, x: Tensor) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each, of many rows and with nothing before or behind."""
        rows = x.reshape(-1, x.shape[-1])
        return [y.view(*x.shape[:-1], y.shape[1]) for many in self._many for y in many(rows)]


class CudaBackend:
    """Packed matrices, experts and the attention of few tokens on one GPU; everything else is declined."""

    name = "cuda"
    max_fused_tokens = b.FUSE_MAX_TOKENS

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        folder: Path,
        others: b.Backend | None = None,
        wide: bool = False,
    ) -> None:
        """`others` attends to many tokens at once; plain torch if there is nobody better.

        With `wide`, 17 to 64 rows have a kernel of their own.
        """
        if dtype is not torch.float16:
            raise Unsupported(f"computes in float16, not in {str(dtype).removeprefix('torch.')}")
        try:
            bindings()
        except MissingExtra as reason:
            raise Unsupported(str(reason)) from reason
        self.device = device
        self.dtype = dtype
        self._others = others or ReferenceBackend(device, dtype)
        self._modules = ModuleCache(device, folder)
        self._tuned = TuneCache(self._modules, tuned_file(folder, torch.cuda.get_device_name(device)))
        self._repacker = GpuRepacker(self._modules)
        self._wide = wide
        self._counters = SplitCounters(self._modules, self._modules.num_sms)

    def linear(self, weight: Weight) -> b.LinearFn:
        """Packed weights, rearranged."""
        if not isinstance(weight, PackedWeight):
            raise Unsupported("only packed matrices")
        return CudaLinear(self._tuned, repack(weight, self._repacker), self._wide)

    def fused_linear(
        self,
        linears: Sequence[b.LinearFn],
        prologue: b.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> b.FusedLinear:
        """Packed matrices in one layout."""
        mine = [one for one in linears if isinstance(one, CudaLinear)]
        if len(mine) < len(linears):
            raise Unsupported("matrices that are not packed")
        if act is not None and act not in ACTS:
            raise Unsupported(f"{act} between matrices")
        if prologue is not None and (prologue.norm.kind != "rms" or prologue.norm.bias):
            raise Unsupported("a norm with a mean or a bias")
        if len(mine) == 1 and prologue is None and act is None and not fp32_out:
            return CudaFusedLinear(mine[0].product, mine)
        normal = None if prologue is None else RmsNorm(prologue.weight + prologue.norm.offset, prologue.norm.eps)
        tiles = unify_groups([one.tiles for one in mine])
        product = self._tuned.product(tiles, normal, act, fp32_out)
        _adopt(mine, tiles)
        return CudaFusedLinear(GemmDispatch(product, self._wide), mine)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Few tokens here, many elsewhere."""
        if attn.head_dim not in HEAD_DIMS:
            raise Unsupported(f"heads of {attn.head_dim} numbers, only of {HEAD_DIMS[0]} and {HEAD_DIMS[1]}")
        return PagedDecodeAttention(self._counters, attn, rope, self._others.attention(attn, rope))

    def moe(self, moe: spec.Moe, gate: list[b.LinearFn], up: list[b.LinearFn], down: list[b.LinearFn]) -> b.MoeFn:
        """Packed experts, those of a layer in one layout."""
        mine = [one for one in (*gate, *up, *down) if isinstance(one, CudaLinear)]
        if len(mine) < 3 * moe.experts:
            raise Unsupported("experts that are not packed")
        if moe.act not in ACTS:
            raise Unsupported(f"{moe.act} between matrices")
        tiles = [one.tiles for one in mine]
        inner, outer = unify_groups(tiles[: 2 * moe.experts]), unify_groups(tiles[2 * moe.experts :])
        pairs = list(zip(inner[: moe.experts], inner[moe.experts :], strict=True))
        crews = (
            ExpertGemm(self._modules, pairs, moe.active, moe.act),
            ExpertGemm(self._modules, [(one,) for one in outer], moe.active),
        )
        _adopt(mine, (*inner, *outer))
        return CudaMoe(moe, crews, (gate, up, down), self._others.gated(moe.act))

    def tune_spaces(self, run: Callable[[], object]) -> list[GemmShape]:
        """The kinds of products that something uses."""
        return self._tuned.used(run)

    def save_tuned(self, spaces: Sequence[b.TuneSpace]) -> Path | None:
        """Write down how they are set."""
        return self._tuned.keep([one for one in spaces if isinstance(one, GemmShape)])

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("only packed matrices, experts and attention")

    embedding = norm = add_norm = activation = gated = rope = _declined


def _adopt(linears: Sequence[CudaLinear], tiles: Sequence[MmaWeight]) -> None:
    """Let matrices that were put in one layout go on in it, so that it is held once."""
    for linear, same in zip(linears, tiles, strict=True):
        if same.layout != linear.tiles.layout:
            linear.use(same)
