"""Fused projections, layers and decoders: one C call instead of a Python call for each operation.

Each C function calls the functions that compute its parts alone, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from ...errors import Unsupported
from .. import interface as b
from .attention import PagedAttention
from .bindings import AttnArgs, FusedMatrices, LayerWeights, Library
from .ops import PackedLinear

MAX_FUSED = 3
"""Matrices of one fused product (csrc/matrix.h)."""


class FusedLinear(b.FusedLinear):
    """Up to three matrices that share an input and its norm; `gated`: the output is silu(first) · second."""

    def __init__(
        self, library: Library, matrices: Sequence[PackedLinear], scale: Tensor | None, eps: float, gated: bool
    ) -> None:
        if len(matrices) > MAX_FUSED or (gated and len(matrices) != 2):
            raise Unsupported("up to three matrices together, two behind a gate")
        self._matrices, self._scale = tuple(matrices), scale  # C holds their addresses
        self._outputs = [m.matrix.out_features for m in matrices][: 1 if gated else None]
        self.struct = FusedMatrices(
            *(matrices[n].matrix.address if n < len(matrices) else None for n in range(MAX_FUSED)),
            *(None if scale is None else scale.data_ptr(), eps, len(matrices), int(gated)),
        )
        self._library = library

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(rows, tokens, inputs) → (rows, tokens, outputs) of each, the residual added to the first."""
        x = x.contiguous()
        rows, tokens = x.shape[:2]
        outs = [torch.empty(rows, tokens, width) for width in self._outputs]
        out_pointers = [out.data_ptr() for out in outs] + [None] * (MAX_FUSED - len(outs))
        residual = None if residual is None else residual.contiguous()
        self._library.fused_linear(
            *(ctypes.addressof(self.struct), x.data_ptr()),
            *(None if residual is None else residual.data_ptr(), rows * tokens),
            *(*out_pointers, torch.get_num_threads()),
        )
        return outs

    def separate(self, x: Tensor) -> list[Tensor]:
        """The raw product of x with each matrix."""
        return [matrix(x) for matrix in self._matrices]

    def fuse_layer(
        self, attend: b.AttentionFn, norm: b.QKNormFn | None, o: b.FusedLinear, gate: b.FusedLinear, down: b.FusedLinear
    ) -> FusedLayer | None:
        """The layer whose q, k and v these are, if every part is of this backend."""
        parts = [part for part in (self, o, gate, down) if isinstance(part, FusedLinear)]
        if norm is not None or len(parts) < 4 or not isinstance(attend, PagedAttention):
            return None
        return FusedLayer(self._library, *parts, attend=attend)


class FusedLayer(b.FusedLayer):
    """A decoder layer: norms, matrices, attention and residual additions."""

    def __init__(
        self,
        library: Library,
        qkv: FusedLinear,
        o: FusedLinear,
        gate: FusedLinear,
        down: FusedLinear,
        *,
        attend: PagedAttention,
    ) -> None:
        self._projections = qkv, o, gate, down  # hold the matrices' memory
        self._weights = LayerWeights(*(part.struct for part in self._projections))
        self.library, self.attend = library, attend
        self.address = ctypes.addressof(self._weights)

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None if C cannot do its attention."""
        return FusedDecoder((self,))(x, (kv,), metadata)

    def fuse_decoder(self, following: Sequence[b.FusedLayer]) -> FusedDecoder | None:
        """This layer and those after it, if all are of this backend and library."""
        layers = [n for n in (self, *following) if isinstance(n, FusedLayer) and n.library is self.library]
        return FusedDecoder(layers) if len(layers) == 1 + len(following) else None


class FusedDecoder:
    """Consecutive decoder layers in one call."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = tuple(layers)  # hold the weights' memory
        self._weights = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        self._decoder_layers = layers[0].library.decoder_layers
        self._batch_args = layers[0].attend.batch_args
        # Pages are held weakly: the arguments of a cache that is gone are never used for another one.
        self._last: tuple[list[ref[b.KVPages]], int, ctypes.Array[AttnArgs] | None] = [], 0, None

    def __call__(self, x: Tensor, kvs: Sequence[b.LayerKVCache], metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the last layer; None if C cannot do some attention."""
        layer_args, batch = self._layer_args(kvs, x.shape[1]), self._batch_args.get(metadata)
        if layer_args is None or batch is None or not x.is_contiguous():
            return None
        out = torch.empty_like(x)
        self._decoder_layers(
            *(self._weights, layer_args, len(kvs), ctypes.byref(batch), x.data_ptr(), out.data_ptr()),
            *(metadata.max_kv_len, torch.get_num_threads()),
        )
        return out

    def _layer_args(self, kvs: Sequence[b.LayerKVCache], tokens: int) -> ctypes.Array[AttnArgs] | None:
        """Each layer's AttnArgs, kept from step to step; None if C cannot do one."""
        pages = [layer_pages for kv in kvs if (layer_pages := kv.kv_pages) is not None]
        if len(pages) < len(self._layers):
            return None
        last_pages, last_tokens, args = self._last
        if last_tokens != tokens or [page_ref() for page_ref in last_pages] != pages:
            found = [layer.attend.layer_args(p, tokens) for layer, p in zip(self._layers, pages, strict=True)]
            supported = [one for one in found if one is not None]
            args = (AttnArgs * len(found))(*supported) if len(supported) == len(found) else None
            self._last = [ref(layer_pages) for layer_pages in pages], tokens, args
        return args
