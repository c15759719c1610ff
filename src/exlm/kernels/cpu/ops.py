"""The operations that are one C call each: products, embedding lookups, norms, gates, attention, decoder layers.

A fused operation gives the same bits as its parts: its C function calls the functions that compute them alone. The
reference computes the attention that C cannot: with masks, decode over fp8 pages (C has prefill for those), keys and
values of different kinds otherwise, and heads that a Hadamard transform would reach across.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from .. import interface
from ..reference import RotaryEmbedding
from .bindings import AttnArgs, AttnParams, BatchArgs, FusedMatrices, LayerWeights, Library, QuantKV, address
from .repack import PackedMatrix

MAX_FUSED = 3
"""Matrices of one fused product (csrc/matrix.h)."""

_QUANT_BITS: dict[interface.KVCacheDtype, int] = {"hadamard8": 8, "hadamard4": 4, "fp8_e5m2": 1}
"""The values of QuantKV.bits (csrc/attn_common.h); 1 stands for FP8."""

_MAX_DECODE_TOKENS = 8
"""With more new tokens for each row C uses its prefill kernel (csrc/attn_common.h)."""


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


# -- attention -------------------------------------------------------------------------------------


class CpuRotaryEmbedding(RotaryEmbedding):
    """RoPE with the reference's tables of sines and cosines, applied by C to contiguous float32."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device, library: Library) -> None:
        super().__init__(rope, length, device)
        self.interleaved = rope.style != "neox"
        self._rope = library.rope
        self._params: dict[int, AttnParams] = {}  # by head_dim

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) twice → the same, the first `dim` numbers of each head rotated."""
        has_c_dtypes = q.dtype is k.dtype is torch.float32 and positions.dtype is torch.int64
        if not has_c_dtypes or not positions.shape == q.shape[:2] == k.shape[:2] or not positions.numel():
            return super().__call__(q, k, positions)
        low, high = positions.aminmax()
        if low < 0 or high >= len(self.cos):
            raise IndexError(f"positions {low} to {high} are not all in 0 to {len(self.cos) - 1}")
        positions = positions.contiguous()
        return self._rotate(q.contiguous(), positions), self._rotate(k.contiguous(), positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, head_dim = x.shape[2:]
        if head_dim not in self._params:
            tables = {"cos": self.cos.data_ptr(), "sin": self.sin.data_ptr()}
            self._params[head_dim] = AttnParams(
                **tables, head_dim=head_dim, rope_dim=self.dim, interleaved=int(self.interleaved)
            )
        out = torch.empty_like(x)
        inputs = ctypes.addressof(self._params[head_dim]), x.data_ptr(), positions.data_ptr()
        self._rope(*inputs, positions.numel(), heads, out.data_ptr(), torch.get_num_threads())
        return out


@dataclass(frozen=True, eq=False)
class NoRotation:
    """The tables of attention without positions (NoPE): no dimension is rotated."""

    cos: Tensor = field(default_factory=lambda: torch.ones(1))
    sin: Tensor = field(default_factory=lambda: torch.zeros(1))
    dim: int = 0
    interleaved: bool = False


class BatchArgsCache:
    """Keeps a step's BatchArgs, so that they are made once for all layers."""

    def __init__(self) -> None:
        self._last: tuple[interface.AttnMetadata, BatchArgs | None] | None = None

    def get(self, metadata: interface.AttnMetadata) -> BatchArgs | None:
        """Pages, past lengths and positions as C takes them; None if it cannot take them."""
        last = self._last
        if last is None or last[0] is not metadata:
            self._last = last = metadata, _batch_args(metadata)
        return last[1]


def _batch_args(metadata: interface.AttnMetadata) -> BatchArgs | None:
    pages, past, positions = metadata.page_table, metadata.past_lens, metadata.positions
    if metadata.mask is not None or positions.dim() != 2 or pages.stride(1) != 1:
        return None
    if not (pages.dtype is past.dtype is positions.dtype is torch.int64):
        return None
    if not (past.is_contiguous() and positions.is_contiguous()):
        return None
    return BatchArgs(pages.data_ptr(), past.data_ptr(), positions.data_ptr(), *positions.shape, pages.stride(0))


class PagedAttention:
    """Causal softmax attention over the pages of a KV cache."""

    def __init__(
        self,
        library: Library,
        attn: spec.Attention,
        rope: CpuRotaryEmbedding | NoRotation,
        batch_args: BatchArgsCache,
        fallback: interface.AttentionFn,
    ) -> None:
        self._attention = library.attention
        self.batch_args = batch_args
        self._fallback = fallback
        self._rope = rope  # holds the memory of its tables
        self._width = attn.heads * attn.head_dim
        self._hadamard_interleave = 2 if attn.kv_heads * attn.head_dim % 64 == 0 else 1
        self._hadamard_fits_head = attn.head_dim % (32 * self._hadamard_interleave) == 0
        self._params = AttnParams(
            cos=rope.cos.data_ptr(),
            sin=rope.sin.data_ptr(),
            heads=attn.heads,
            kv_heads=attn.kv_heads,
            head_dim=attn.head_dim,
            rope_dim=rope.dim,
            interleaved=int(rope.interleaved),
            window=attn.window or 0,
            scale=attn.scale,
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: interface.LayerKVCache, metadata: interface.AttnMetadata
    ) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        pages, batch = kv.kv_pages, self.batch_args.get(metadata)
        args = None if pages is None or batch is None else self.layer_args(pages, q.shape[1])
        if args is None or batch is None:
            return self._fallback(q, k, v, kv, metadata)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty(*q.shape[:2], self._width)
        args.q, args.k, args.v, args.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        args.pages, args.past_lens, args.positions = batch.pages, batch.past_lens, batch.positions
        args.rows, args.tokens, args.page_stride = batch.rows, batch.tokens, batch.page_stride
        self._attention(ctypes.byref(args), metadata.max_kv_len, torch.get_num_threads())
        return out

    def layer_args(self, pages: interface.KVPages, tokens: int) -> AttnArgs | None:
        """The arguments of a call without q, k, v and the batch; None if C cannot do it."""
        args = AttnArgs(
            params=ctypes.addressof(self._params),
            page_size=pages.page_size,
            hadamard_interleave=self._hadamard_interleave,
        )
        key_dtype, value_dtype = pages.dtypes
        keys, values = pages.keys, pages.values
        if key_dtype == value_dtype == "float":
            if keys[0].dtype not in (torch.float32, torch.float16):
                return None
            args.keys, args.values = keys[0].data_ptr(), values[0].data_ptr()
            args.kv_f16 = keys[0].dtype is torch.float16
            return args
        if key_dtype not in _QUANT_BITS or value_dtype not in _QUANT_BITS:
            return None
        if tokens <= _MAX_DECODE_TOKENS and "fp8_e5m2" in pages.dtypes:
            return None
        if not self._hadamard_fits_head and pages.dtypes != ("fp8_e5m2", "fp8_e5m2"):
            return None
        args.quant_keys = QuantKV(keys[0].data_ptr(), keys[-1].data_ptr(), _QUANT_BITS[key_dtype])
        args.quant_values = QuantKV(values[0].data_ptr(), values[-1].data_ptr(), _QUANT_BITS[value_dtype])
        return args


# -- several operations at a time --------------------------------------------------------------------


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
