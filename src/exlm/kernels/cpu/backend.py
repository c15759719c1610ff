"""The CPU backend: which weights and operations the C kernels take, in float32.

It refuses (`Unsupported`) dense matrices that need more than 16 bits a number, norms other than RMS norm,
gates other than silu, attention with softcap, activations without a gate, mixtures of experts and recurrences
whose widths are no multiples of 16: the reference backend computes those.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ...formats import DenseWeight, PackedWeight, Weight
from ...formats.host_buffers import HugePageArena
from .. import interface
from ..packed_store import PackedStore
from ..reference import ReferenceBackend
from .bindings import load
from .ops import (
    BatchArgsCache,
    CpuRotaryEmbedding,
    FusedLinear,
    NoRotation,
    PackedEmbedding,
    PackedLinear,
    PaddedLinear,
    PagedAttention,
    RmsNorm,
    silu_mul,
)
from .packed_cache import CpuPackedCopy
from .recurrent import CpuDeltaNet, CpuMamba2, CpuShortConv
from .repack import FLOAT_TILE_N, PackedMatrix, pack_dense, repack_panels


class CpuBackend:
    """The C kernels for this machine's processor."""

    name = "cpu"
    max_fused_tokens = sys.maxsize  # prompts gain by fusion too

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        folder: Path,
        instructions: str | None = None,
        activation_bits: interface.ActivationBits = 16,
    ) -> None:
        if dtype is not torch.float32:
            raise Unsupported(f"computes in float32, not in {str(dtype).removeprefix('torch.')}")
        self.device = device
        self.dtype = dtype
        self._activation_bits = activation_bits
        self._library = load(folder, instructions)
        self._reference = ReferenceBackend(device, dtype)
        self._batch_args = BatchArgsCache()
        self._arena = HugePageArena()
        # Embedding tables, which the head may share.
        self._embeddings: WeakKeyDictionary[Weight, PackedMatrix] = WeakKeyDictionary()

    def linear(self, weight: Weight) -> interface.LinearFn:
        """A quantised matrix in panels, or a dense one in 12 or 16 bits a number.

        A dense one with few outputs, such as the decay of a delta net or the gate of a shared expert, is padded.
        """
        if isinstance(weight, DenseWeight) and (missing := -weight.out_features % FLOAT_TILE_N):
            bias = None if weight.bias is None else F.pad(weight.bias, (0, missing))
            padded = DenseWeight(F.pad(weight.data, (0, 0, 0, missing)), bias)
            return PaddedLinear(PackedLinear(self._library, self._pack(padded)), weight.out_features)
        return PackedLinear(self._library, self._embeddings.get(weight) or self._pack(weight))

    def embedding(self, weight: Weight) -> interface.EmbeddingFn:
        """An embedding table, repacked once even if it is also the head's matrix."""
        if isinstance(weight, DenseWeight) and weight.data.dtype is not torch.float32:
            raise Unsupported("only packed tables, and those of a head")
        matrix = self._embeddings[weight] = self._pack(weight)
        dtype = weight.dtype if isinstance(weight, PackedWeight) else torch.float32
        return PackedEmbedding(self._library, matrix, dtype)

    def packed_copy(self, store: PackedStore, fingerprint: str, model: str) -> interface.PackedCopy:
        """The packed matrices of a model on disk."""
        # How a matrix is cut into spans depends on the activations.
        key = f"{fingerprint} {self._activation_bits}"
        return CpuPackedCopy(store, key, model, self._library, self._arena)

    def _pack(self, weight: Weight) -> PackedMatrix:
        if isinstance(weight, PackedWeight):
            return repack_panels(weight, self._library, self._arena, self._activation_bits)
        if isinstance(weight, DenseWeight):
            return pack_dense(weight, self._library, self._arena)
        raise Unsupported("only packed and dense matrices")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.NormFn:
        """RMS norm with one scale."""
        return self._rms_norm(norm, weight)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.AddNormFn:
        """RMS norm of a sum."""
        return self._rms_norm(norm, weight).add_norm

    def _rms_norm(self, norm: spec.Norm, weight: Tensor) -> RmsNorm:
        if norm.kind != "rms" or weight.dim() != 1:
            raise Unsupported("only RMS norm with one scale")
        scale = (weight.float() + norm.offset).contiguous()
        return RmsNorm(self._library, scale, norm.eps, self._reference.norm(norm, weight, None))

    def gated(self, act: spec.Activation) -> interface.GatedActivationFn:
        """silu(gate) · up."""
        if act != "silu":
            raise Unsupported("only silu")
        return partial(silu_mul, self._library)

    def rope(self, rope: spec.Rope, length: int) -> interface.RopeFn:
        """Sine and cosine tables for every position."""
        return CpuRotaryEmbedding(rope, length, self.device, self._library)

    def attention(self, attn: spec.Attention, rope: interface.RopeFn) -> interface.AttentionFn:
        """Paged attention; calls that C cannot do go to the reference."""
        tables = NoRotation() if rope is interface.no_rope else rope
        if attn.softcap is not None or not isinstance(tables, CpuRotaryEmbedding | NoRotation):
            raise Unsupported("only attention with RoPE of this backend or without positions, and without softcap")
        if attn.head_dim % 16 or attn.head_dim > 512:
            raise Unsupported(f"head_dim {attn.head_dim} is no multiple of 16 up to 512")
        fallback = self._reference.attention(attn, rope)
        return PagedAttention(self._library, attn, tables, self._batch_args, fallback)

    def delta_net(self, mixer: spec.DeltaNet, params: interface.DeltaNetParams) -> interface.DeltaNetFn:
        """Convolution, delta rule, norm and gate as one C call."""
        return CpuDeltaNet(self._library, mixer, params, self._reference.delta_net(mixer, params))

    def mamba2(self, mixer: spec.Mamba2, params: interface.Mamba2Params) -> interface.Mamba2Fn:
        """Convolution, state-space recurrence, gate and norm as one C call."""
        return CpuMamba2(self._library, mixer, params, self._reference.mamba2(mixer, params))

    def short_conv(self, mixer: spec.ShortConv, conv: Tensor, bias: Tensor | None) -> interface.ShortConvFn:
        """The gated convolution as one C call."""
        return CpuShortConv(self._library, mixer, conv, bias, self._reference.short_conv(mixer, conv, bias))

    def fused_linear(
        self,
        linears: Sequence[interface.LinearFn],
        prologue: interface.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> interface.FusedLinear:
        """Matrices of this backend with an RMS norm before them, or two with silu after them."""
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        if len(packed) != len(linears) or act not in (None, "silu"):
            raise Unsupported("only packed matrices, and silu")
        norm = None if prologue is None else self._rms_norm(prologue.norm, prologue.weight)
        return FusedLinear(self._library, packed, norm, gated=act is not None)

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("left to plain torch")

    activation = moe = _unsupported
