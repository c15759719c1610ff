"""A decoder layer of few rows in a few launches, each of which prepacks the next one's activations."""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import Unsupported
from .. import interface as b
from .attention import PagedDecodeAttention
from .gemm_m64 import GemmDispatch
from .module_cache import ModuleSource, sizeof_defines
from .prepacked_acts import EpilogueTarget, PackedActs

PACK_ROWS_SOURCE = Path(__file__).with_name("csrc") / "pack_rows.cu"

_PACK_THREADS = 256


class _PackRowsParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "gate_stride")),
        ("target", EpilogueTarget),
        *((name, ctypes.c_int) for name in ("rows", "inputs")),
    )


class MixerCore(Protocol):
    """What stands between a layer's input projections and its output projection."""

    def supports(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Whether its kernels can serve the batch."""
        ...

    def __call__(
        self, products: Sequence[Tensor], x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata, out: PackedActs
    ) -> None:
        """Fill `out` from the products of the residual stream x."""
        ...


@dataclass(frozen=True, eq=False)
class PackingAttention:
    """Attention that packs its own output."""

    attend: PagedDecodeAttention
    qk_norm: b.QKNormFn | None

    def supports(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Whether the attention's kernels can."""
        return kv.kv_pages is not None and self.attend.supports(x.shape[0], x.shape[1], kv, metadata)

    def __call__(
        self, products: Sequence[Tensor], x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata, out: PackedActs
    ) -> None:
        """Attend with q, k and v."""
        assert kv.kv_pages is not None  # by `supports`
        q, k, v = (one.view(*x.shape[:2], -1, self.attend.attn.head_dim) for one in products)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        self.attend.launch(q, k, v, kv.kv_pages, metadata, packed_out=out)


@dataclass(frozen=True, eq=False)
class MixThenPack:
    """Any mixer core in float16; a launch of `pack_rows` packs its output, and gates it."""

    modules: ModuleSource
    mix: b.MixFn

    def supports(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Always."""
        return True

    def __call__(
        self, products: Sequence[Tensor], x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata, out: PackedActs
    ) -> None:
        """Mix, gate and pack."""
        heads, gate = self.mix([one.view(*x.shape[:2], -1) for one in products], x, kv, metadata)
        rows = heads.reshape(len(out), -1)
        assert rows.dtype is torch.float16
        assert rows.stride(1) == 1
        params = _PackRowsParams(x=rows.data_ptr(), x_stride=rows.stride(0), rows=len(rows), inputs=rows.shape[1])
        params.target = out.target()
        if gate is not None:
            gate = gate.reshape(len(out), -1)
            assert gate.shape == rows.shape
            assert gate.dtype is torch.float16
            assert gate.stride(1) == 1
            params.gate, params.gate_stride = gate.data_ptr(), gate.stride(0)
        module = self.modules.module(PACK_ROWS_SOURCE, **sizeof_defines(PackRowsParams=_PackRowsParams))
        module.launch("pack_rows", (-(-rows.shape[1] // _PACK_THREADS), len(rows), 1), _PACK_THREADS, 0, (params,))


class CudaFusedLayer(b.FusedLayer):
    """Input projections, mixer, o, gate and up, down; norms, activation, residuals in prologues and epilogues."""

    def __init__(self, gemms: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch], mixer: MixerCore) -> None:
        """`gemms`: inputs, o, gate and up, down. `Unsupported` if one of them cannot read prepacked activations."""
        self._gemms, self._mixer = gemms, mixer
        self._in_proj_layout, self._o_layout, self._gate_up_layout, self._down_layout = (
            one.gemm.input_layout for one in gemms
        )
        self._next: CudaFusedLayer | None = None
        self._prepacked: MutableMapping[Tensor, tuple[PackedActs, int]] = WeakTensorKeyDictionary()
        """Inputs of this layer that the layer before has prepacked, and their version then."""

    def chain_to(self, following: b.FusedLayer) -> None:
        """Prepack the output for this layer as well."""
        if isinstance(following, CudaFusedLayer) and following._gemms[0].gemm.device == self._gemms[0].gemm.device:
            self._next = following

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None if its kernels do not support the batch."""
        count = x.shape[0] * x.shape[1]
        kernels = [gemm.kernel(count) for gemm in self._gemms]
        if None in kernels or not self._mixer.supports(x, kv, metadata):
            return None
        in_proj, o, gate_up, down = (kernel for kernel in kernels if kernel is not None)
        residual = x.reshape(count, -1).contiguous()
        products = self._gemms[0].gemm.empty_outputs(count)
        prepacked = self._take_prepacked(x)
        in_proj(residual if prepacked is None else prepacked, products)
        o_input = self._o_layout.allocate(count, 0)
        self._mixer(products, x, kv, metadata, o_input)
        (mixed,) = self._gemms[1].gemm.empty_outputs(count)
        gate_up_input = self._gate_up_layout.allocate(count, o.num_partials)
        o(o_input, [mixed], residual, gate_up_input)
        down_input = self._down_layout.allocate(count, 0)
        gate_up(gate_up_input, [], None, down_input)
        (out,), following = self._gemms[3].gemm.empty_outputs(count), self._next
        prepacked = None if following is None else following._in_proj_layout.allocate(count, down.num_partials)
        down(down_input, [out], mixed, prepacked)
        out = out.view(x.shape)
        if following is not None and prepacked is not None:
            following._prepacked[out] = prepacked, _version(out)
        return out

    def _take_prepacked(self, x: Tensor) -> PackedActs | None:
        """x as the layer before has prepacked it, unless torch counted a write to it since.

        In inference mode torch counts none: nothing may write to the residual stream between layers there.
        """
        if x not in self._prepacked:
            return None
        acts, version = self._prepacked.pop(x)
        return acts if version == _version(x) else None


def fuse_layer_kernels(
    gemms: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch], mixer: MixerCore
) -> CudaFusedLayer | None:
    """The layer; None if its parts cannot prepack activations for each other."""
    try:
        return CudaFusedLayer(gemms, mixer)
    except Unsupported:
        return None


def _version(x: Tensor) -> int:
    """How often it was written to; torch does not count that in inference mode."""
    return 0 if x.is_inference() else x._version
