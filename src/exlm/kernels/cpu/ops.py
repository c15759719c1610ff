"""The operations that are one C call each: products, embedding lookups, norms, gates and whole decoder layers.

A fused operation gives the same bits as its parts: its C function calls the functions that compute them alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from ...errors import Unsupported
from .. import interface
from .attention import PagedAttention
from .bindings import AttnArgs, FusedMatrices, LayerWeights, Library, address
from .repack import PackedMatrix

MAX_FUSED = 3
"""Matrices of one fused product (csrc/matrix.h)."""


class PackedLinear:
    """x @ W + bias for any number of rows; a row's result is the same bits in any batch."""

    def __init__(self, library: Library, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._linear = library.linear
        self._address = matrix.address
        self._outputs = matrix.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), float32."""
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self.matrix.in_features
        self._linear(self._address, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads())
        return y


@dataclass(frozen=True, eq=False)
class PaddedLinear:
    """A matrix whose outputs were padded to whole tiles."""

    inner: PackedLinear
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), float32."""
        return self.inner(x)[..., : self.outputs].contiguous()


@dataclass(frozen=True, eq=False)
class PackedEmbedding:
    """Embedding lookup in a packed matrix, in the precision its format defines."""

    library: Library
    matrix: PackedMatrix
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, tokens) ids → (rows, tokens, inputs)."""
        ids = ids.long().contiguous()
        out = torch.empty(*ids.shape, self.matrix.in_features)
        self.library.dequantize_columns(self.matrix.address, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out.to(self.dtype)


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """x / rms(x) · scale."""

    library: Library
    scale: Tensor  # (width,)
    eps: float
    fallback: interface.NormFn  # for x that is not contiguous float32

    def __call__(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        return self._run(x, None, None) if _is_plain(x) else self.fallback(x)

    def add_norm(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y and its norm."""
        if y is None:
            return x, self(x)
        if not (_is_plain(x) and _is_plain(y)):
            total = x + y
            return total, self.fallback(total)
        total = torch.empty_like(x)
        return total, self._run(x, y, total)

    def _run(self, x: Tensor, residual: Tensor | None, total: Tensor | None) -> Tensor:
        out, width = torch.empty_like(x), self.scale.shape[0]
        pointers = x.data_ptr(), address(residual), self.scale.data_ptr()
        sizes = x.numel() // width, width
        outputs = address(total), out.data_ptr()
        self.library.rms_norm(*pointers, self.eps, *sizes, *outputs, torch.get_num_threads())
        return out


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def silu_mul(library: Library, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    library.silu_mul(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), torch.get_num_threads())
    return out


class FusedLinear(interface.FusedLinear):
    """Up to three matrices that share an input and the norm before it; `gated`: the output is silu(first) · second."""

    def __init__(
        self, library: Library, matrices: Sequence[PackedLinear], norm: RmsNorm | None, *, gated: bool
    ) -> None:
        if len(matrices) > MAX_FUSED or (gated and len(matrices) != 2):
            raise Unsupported("up to three matrices together, two behind a gate")
        self._matrices, self._norm = tuple(matrices), norm  # C holds their addresses
        self._outputs = [m.matrix.out_features for m in matrices][: 1 if gated else None]
        addresses = [m.matrix.address for m in matrices] + [None] * (MAX_FUSED - len(matrices))
        scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
        self.struct = FusedMatrices(*addresses, address(scale), eps, len(matrices), int(gated))
        self._library = library

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(rows, tokens, inputs) → (rows, tokens, outputs) of each, the residual added to the first."""
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        rows, tokens = x.shape[:2]
        outs = [torch.empty(rows, tokens, width) for width in self._outputs]
        pointers = ctypes.addressof(self.struct), x.data_ptr(), address(residual)
        outputs = [out.data_ptr() for out in outs] + [None] * (MAX_FUSED - len(outs))
        self._library.fused_linear(*pointers, rows * tokens, *outputs, torch.get_num_threads())
        return outs

    def unfused(self, x: Tensor) -> list[Tensor]:
        """The raw product of x with each matrix."""
        return [matrix(x) for matrix in self._matrices]

    def fuse_layer(
        self,
        attend: interface.AttentionFn,
        norm: interface.QKNormFn | None,
        o: interface.FusedLinear,
        gate_up: interface.FusedLinear,
        down: interface.FusedLinear,
    ) -> FusedLayer | None:
        """The layer whose q, k and v these are, if every part is of this backend."""
        parts = [part for part in (self, o, gate_up, down) if isinstance(part, FusedLinear)]
        if norm is not None or len(parts) < 4 or not isinstance(attend, PagedAttention):
            return None
        return FusedLayer(self._library, parts, attend)


class FusedLayer(interface.FusedLayer):
    """A decoder layer: norms, matrices (q/k/v, o, gate/up, down), attention and residual additions."""

    def __init__(self, library: Library, matrices: Sequence[FusedLinear], attend: PagedAttention) -> None:
        self._matrices = tuple(matrices)  # C holds their addresses
        self._weights = LayerWeights(*(part.struct for part in matrices))
        self.library, self.attend = library, attend
        self.address = ctypes.addressof(self._weights)

    def __call__(self, x: Tensor, kv: interface.LayerKVCache, metadata: interface.AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None if C cannot do its attention."""
        return FusedDecoder((self,))(x, (kv,), metadata)

    def fuse_decoder(self, following: Sequence[interface.FusedLayer]) -> FusedDecoder | None:
        """This layer and those after it, if all are of this backend and library."""
        layers = [n for n in (self, *following) if isinstance(n, FusedLayer) and n.library is self.library]
        return FusedDecoder(layers) if len(layers) == 1 + len(following) else None


class FusedDecoder:
    """Consecutive decoder layers in one call."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = tuple(layers)  # C holds their addresses
        self._weights = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        self._decoder_layers = layers[0].library.decoder_layers
        self._batch_args = layers[0].attend.batch_args
        # Pages are held weakly: the arguments of a cache that is gone are never used for another one.
        self._last: tuple[list[ref[interface.KVPages]], int, ctypes.Array[AttnArgs] | None] = [], 0, None

    def __call__(
        self, x: Tensor, kvs: Sequence[interface.LayerKVCache], metadata: interface.AttnMetadata
    ) -> Tensor | None:
        """The residual stream after the last layer; None if C cannot do some attention."""
        layer_args, batch = self._layer_args(kvs, x.shape[1]), self._batch_args.get(metadata)
        if layer_args is None or batch is None or not x.is_contiguous():
            return None
        out = torch.empty_like(x)
        layers = self._weights, layer_args, len(kvs), ctypes.byref(batch)
        self._decoder_layers(*layers, x.data_ptr(), out.data_ptr(), metadata.max_kv_len, torch.get_num_threads())
        return out

    def _layer_args(self, kvs: Sequence[interface.LayerKVCache], tokens: int) -> ctypes.Array[AttnArgs] | None:
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
