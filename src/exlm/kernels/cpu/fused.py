"""Fused projections, layers and decoders: what lies between two Python calls shrinks to nothing.

Each C function runs the very functions that compute its parts alone, so the bits are the same.
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
from .bindings import AttnArgs, LayerWeights, Library, LinearGroup, out_of_memory
from .ops import PackedLinear

MAX_FUSED = 3
"""Matrices of one fused product (csrc/matrix.h)."""


class FusedLinear(b.FusedLinear):
    """Up to three matrices behind one norm; with `gated` two, and the output is silu(first) · second."""

    def __init__(
        self,
        library: Library,
        matrices: Sequence[PackedLinear],
        scale: Tensor | None,
        eps: float,
        gated: bool,
    ) -> None:
        if len(matrices) > MAX_FUSED or (gated and len(matrices) != 2):
            raise Unsupported("up to three matrices together, two behind a gate")
        self._matrices, self._scale = tuple(matrices), scale  # C holds their addresses
        self._outputs = [one.matrix.out_features for one in matrices][: 1 if gated else None]
        self.struct = LinearGroup(
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
        added = None if residual is None else residual.data_ptr()
        if self._library.fused_linear(
            *(ctypes.addressof(self.struct), x.data_ptr(), added, rows * tokens),
            *(*out_pointers, torch.get_num_threads()),
        ):
            raise out_of_memory()
        return outs

    def separate(self, x: Tensor) -> list[Tensor]:
        """The raw product of x with each matrix."""
        return [matrix(x) for matrix in self._matrices]

    def fuse_layer(
        self,
        attend: b.AttentionFn,
        norm: b.QKNormFn | None,
        o: b.FusedLinear,
        gate: b.FusedLinear,
        down: b.FusedLinear,
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
        self._held = qkv, o, gate, down
        self._weights = LayerWeights(*(part.struct for part in self._held))
        self.library, self.attend = library, attend
        self.address = ctypes.addressof(self._weights)

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None if C cannot do its attention."""
        return FusedDecoder((self,))(x, (kv,), metadata)

    def fuse_decoder(self, following: Sequence[b.FusedLayer]) -> FusedDecoder | None:
        """This layer and those after it, if all are of this backend and library."""
        layers = [one for one in (self, *following) if isinstance(one, FusedLayer)]
        same = all(one.library is self.library for one in layers)
        return FusedDecoder(layers) if same and len(layers) == 1 + len(following) else None


class FusedDecoder:
    """Consecutive decoder layers in one call."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._held = tuple(layers)
        self._attends = [one.attend for one in layers]
        self._weights = (ctypes.c_void_p * len(layers))(*(one.address for one in layers))
        self._decoder_layers = layers[0].library.decoder_layers
        self._batch_pointers = layers[0].attend.batch_pointers
        self._known: tuple[list[ref[b.KVPages]], int, ctypes.Array[AttnArgs] | None] = [], 0, None

    def __call__(self, x: Tensor, kvs: Sequence[b.LayerKVCache], metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream after the last layer; None if C cannot do some attention."""
        layers, batch = self._layer_args(kvs, x.shape[1]), self._batch_pointers.of(metadata)
        if layers is None or batch is None or not x.is_contiguous():
            return None
        out = torch.empty_like(x)
        if self._decoder_layers(
            *(self._weights, layers, len(kvs), ctypes.byref(batch), x.data_ptr(), out.data_ptr()),
            *(metadata.max_kv_len, torch.get_num_threads()),
        ):
            raise out_of_memory()
        return out

    def _layer_args(self, kvs: Sequence[b.LayerKVCache], tokens: int) -> ctypes.Array[AttnArgs] | None:
        """Each layer's AttnArgs, kept from step to step; None if C cannot do one.

        Pages are held weakly: the args of a cache that is gone are never used for another one.
        """
        pages = [own for kv in kvs if (own := kv.kv_pages) is not None]
        if len(pages) < len(self._attends):
            return None
        known_pages, known_tokens, args = self._known
        if known_tokens != tokens or [one() for one in known_pages] != pages:
            args = self._make_args(pages, tokens)
            self._known = [ref(own) for own in pages], tokens, args
        return args

    def _make_args(self, pages: Sequence[b.KVPages], tokens: int) -> ctypes.Array[AttnArgs] | None:
        args = []
        for attend, own in zip(self._attends, pages, strict=True):
            layer = attend.args(own, tokens)
            if layer is None:
                return None
            args.append(layer)
        return (AttnArgs * len(args))(*args)
