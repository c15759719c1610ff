"""Matrices with what stands around them as one call, for a few rows, and whole layers as one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from weakref import ref

import torch
from torch import Tensor

from ...errors import Unsupported
from .. import interface as b
from .attention import CODED, FLOATS, NULL_POINTERS, PagedAttention
from .bindings import LayerWeights, Library, LinearGroup, check
from .linear import PackedLinear

_STANDING = Struct("3P3i4x")  # what C calls a Standing


class FusedLinear(b.FusedLinear):
    """Up to three matrices behind one norm; with `gated` two, whose answer is silu(first) · second.

    Bit for bit what the norm, the matrices and the gate give one by one.
    """

    def __init__(
        self,
        library: Library,
        matrices: Sequence[PackedLinear],
        scale: Tensor | None,
        eps: float,
        gated: bool,
    ) -> None:
        if len(matrices) > 3 or (gated and len(matrices) != 2):
            raise Unsupported("up to three matrices together, two behind a gate")
        self._matrices, self._scale = tuple(matrices), scale  # C holds their addresses
        self._outputs = [one.matrix.out_features for one in matrices][: 1 if gated else None]
        self.struct = LinearGroup(
            *(matrices[n].matrix.address if n < len(matrices) else None for n in range(3)),
            *(None if scale is None else scale.data_ptr(), eps, len(matrices), int(gated)),
        )
        self._address = ctypes.addressof(self.struct)
        self._library = library

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(rows, tokens, inputs) → (rows, tokens, outputs) of each, the residual added to the first."""
        x = x.contiguous()
        rows, tokens = x.shape[:2]
        outs = [torch.empty(rows, tokens, width) for width in self._outputs]
        places = [out.data_ptr() for out in outs] + [None] * (3 - len(outs))
        more = None if residual is None else residual.contiguous()
        check(
            self._library.fused_linear(
                *(self._address, x.data_ptr(), None if more is None else more.data_ptr(), rows * tokens),
                *(*places, torch.get_num_threads()),
            )
        )
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
        """The whole layer that these begin, if every part is of this kind."""
        parts = [part for part in (self, o, gate, down) if isinstance(part, FusedLinear)]
        if norm is not None or len(parts) < 4 or not isinstance(attend, PagedAttention):
            return None
        return FusedLayer(self._library, *parts, attend=attend)


class FusedLayer(b.FusedLayer):
    """A layer's norms, matrices, attention and sums, for as few new tokens as its attention takes."""

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
        self._parts = LayerWeights(*(part.struct for part in self._held))
        self.library, self.attend = library, attend
        self.address = ctypes.addressof(self._parts)

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream behind the layer; None if its attention must be done otherwise."""
        return FusedDecoder((self,))(x, (kv,), metadata)

    def fuse_decoder(self, following: Sequence[b.FusedLayer]) -> FusedDecoder | None:
        """This layer and those behind it, if all are of this kind."""
        layers = [one for one in (self, *following) if isinstance(one, FusedLayer)]
        same = all(one.library is self.library for one in layers)
        return FusedDecoder(layers) if same and len(layers) == 1 + len(following) else None


class FusedDecoder:
    """Layers one behind the other in one call, so that nothing between them waits for the interpreter."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._held = tuple(layers)
        self._attends = [one.attend for one in layers]
        self._parts = (ctypes.c_void_p * len(layers))(*(one.address for one in layers))
        self._layers = layers[0].library.decoder_layers
        self._batch_pointers = layers[0].attend.batch_pointers
        self._known: tuple[list[ref[b.KVPages]], int, bytes | None] = [], 0, None

    def __call__(self, x: Tensor, kvs: Sequence[b.LayerKVCache], metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream behind the last layer; None if some attention must be done otherwise."""
        rows, tokens = x.shape[:2]
        calls, places = self._calls(kvs, tokens), self._batch_pointers.of(metadata)
        if calls is None or places is None or not x.is_contiguous():
            return None
        *pointers, stride = places
        out = torch.empty_like(x)
        told = self._parts, calls, len(kvs), _STANDING.pack(*pointers, rows, tokens, stride)
        check(self._layers(*told, x.data_ptr(), out.data_ptr(), metadata.max_kv_len, torch.get_num_threads()))
        return out

    def _calls(self, kvs: Sequence[b.LayerKVCache], tokens: int) -> bytes | None:
        """What C is told of each layer's cache, from one step to the next the same; None if it cannot do one.

        Nothing is held: pages that are gone are found to be others.
        """
        pages = [own for kv in kvs if (own := kv.paged) is not None]
        if len(pages) < len(self._attends):
            return None
        seen, of, calls = self._known
        if of != tokens or [one() for one in seen] != pages:
            calls = self._made(pages, tokens)
            self._known = [ref(own) for own in pages], tokens, calls
        return calls

    def _made(self, pages: Sequence[b.KVPages], tokens: int) -> bytes | None:
        calls = []
        for attend, own in zip(self._attends, pages, strict=True):
            call = attend.call((0, 0, 0), 0, 0, tokens, own, NULL_POINTERS)
            if call is None:
                return None
            calls.append(call if len(call) == CODED else call + FLOATS)
        return b"".join(calls)
