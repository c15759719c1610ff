"""A decoder layer of few rows in five launches, each of which prepacks the next one's activations."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import Unsupported
from .. import interface as b
from .attention import PagedDecodeAttention
from .gemm_m64 import GemmDispatch
from .prepacked_acts import PackedActs


class CudaFusedLayer(b.FusedLayer):
    """qkv, attention, o, gate and up, down; norms, activation and residuals are in their prologues and epilogues."""

    def __init__(
        self,
        gemms: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch],
        attend: PagedDecodeAttention,
        qk_norm: b.QKNormFn | None,
    ) -> None:
        """`gemms`: qkv, o, gate and up, down. `Unsupported` if one of them cannot read prepacked activations."""
        self._gemms = gemms
        self._attend, self._qk_norm = attend, qk_norm
        self._qkv_input, self._o_input, self._gate_up_input, self._down_input = (one.gemm.input_layout for one in gemms)
        self._next: CudaFusedLayer | None = None
        self._prepacked: MutableMapping[Tensor, tuple[PackedActs, int]] = WeakTensorKeyDictionary()
        """Inputs of this layer that the layer before has prepacked, and their version then."""

    def chain_to(self, following: b.FusedLayer) -> None:
        """Prepack the output for this layer as well."""
        if isinstance(following, CudaFusedLayer) and following._gemms[0].gemm.device == self._gemms[0].gemm.device:
            self._next = following

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None if its kernels do not support the batch."""
        rows, tokens = x.shape[:2]
        count, pages = rows * tokens, kv.kv_pages
        kernels = [gemm.kernel(count) for gemm in self._gemms]
        if pages is None or None in kernels or not self._attend.supports(rows, tokens, kv, metadata):
            return None
        qkv, o, gate_up, down = (kernel for kernel in kernels if kernel is not None)
        residual = x.reshape(count, -1).contiguous()
        heads = self._gemms[0].gemm.empty_outputs(count)
        qkv(self._take_prepacked(x) or residual, heads)
        q, k, v = (one.view(rows, tokens, -1, self._attend.attn.head_dim) for one in heads)
        if self._qk_norm is not None:
            q, k = self._qk_norm(q, k)
        attended = self._o_input.allocate(count, 0)
        self._attend.launch(q, k, v, pages, metadata, packed_out=attended)
        (middle,) = self._gemms[1].gemm.empty_outputs(count)
        normed = self._gate_up_input.allocate(count, o.num_partials)
        o(attended, [middle], residual, normed)
        hidden = self._down_input.allocate(count, 0)
        gate_up(normed, [], None, hidden)
        (out,), following = self._gemms[3].gemm.empty_outputs(count), self._next
        prepacked = None if following is None else following._qkv_input.allocate(count, down.num_partials)
        down(hidden, [out], middle, prepacked)
        out = out.view(x.shape)
        if following is not None and prepacked is not None:
            following._prepacked[out] = prepacked, _version(out)
        return out

    def _take_prepacked(self, x: Tensor) -> PackedActs | None:
        """x as the layer before has prepacked it, unless it was changed since."""
        if x not in self._prepacked:
            return None
        acts, version = self._prepacked.pop(x)
        return acts if version == _version(x) else None


def fuse_layer_kernels(
    gemms: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch],
    attend: b.AttentionFn,
    qk_norm: b.QKNormFn | None,
) -> CudaFusedLayer | None:
    """The layer; None if its parts cannot prepack activations for each other."""
    if not isinstance(attend, PagedDecodeAttention):
        return None
    try:
        return CudaFusedLayer(gemms, attend, qk_norm)
    except Unsupported:
        return None


def _version(x: Tensor) -> int:
    """How often it was written to; torch does not count that in inference mode."""
    return 0 if x.is_inference() else x._version
