"""The CPU backend: which weights and operations the C kernels take, in float32.

It refuses (`Unsupported`) dense matrices that need more than 16 bits a number, norms other than RMS norm,
gates other than silu, attention with softcap, activations without a gate and mixtures of experts: the
reference backend computes those.
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
from .. import interface as b
from ..reference import ReferenceBackend
from .arena import HugePageArena
from .attention import BatchArgsCache, CpuRotaryEmbedding, PagedAttention
from .bindings import load
from .fused import FusedLinear
from .ops import AddRmsNorm, PackedEmbedding, PackedLinear, RmsNorm, SiluMul
from .repack import PackedMatrix, pack_dense, repack_panels


class CpuBackend:
    """The C kernels for this machine's processor."""

    name = "cpu"
    max_fused_tokens = sys.maxsize  # prompts gain by fusion too

    def __init__(self, device: torch.device, dtype: torch.dtype, folder: Path, instructions: str | None = None) -> None:
        if dtype is not torch.float32:
            raise Unsupported(f"computes in float32, not in {str(dtype).removeprefix('torch.')}")
        self.device = device
        self.dtype = dtype
        self._library = load(folder, instructions)
        self._reference = ReferenceBackend(device, dtype)
        self._batch_args = BatchArgsCache()
        self._arena = HugePageArena()
        # Embedding tables, which the head may share.
        self._embeddings: WeakKeyDictionary[Weight, PackedMatrix] = WeakKeyDictionary()

    def linear(self, weight: Weight) -> b.LinearFn:
        """A quantised matrix in panels, or a dense one in 12 or 16 bits a number."""
        if weight in self._embeddings:
            return PackedLinear(self._library, self._embeddings[weight])
        threads = torch.get_num_threads()
        if isinstance(weight, PackedWeight):
            return PackedLinear(self._library, repack_panels(weight, self._library, threads, self._arena))
        if isinstance(weight, DenseWeight):
            return PackedLinear(self._library, pack_dense(weight, self._library, threads, self._arena)[0])
        raise Unsupported("only packed and dense matrices")

    def embedding(self, weight: Weight) -> b.EmbeddingFn:
        """An embedding table, repacked once even if it is also the head's matrix."""
        threads = torch.get_num_threads()
        if isinstance(weight, PackedWeight):
            matrix = repack_panels(weight, self._library, threads, self._arena)
            self._embeddings[weight] = matrix
            return PackedEmbedding(self._library, matrix, weight.dtype)
        if not isinstance(weight, DenseWeight) or weight.data.dtype is not torch.float32:
            raise Unsupported("only packed tables, and those of a head")
        matrix, data = pack_dense(weight, self._library, threads, self._arena)
        self._embeddings[weight] = matrix
        if data is None:
            return PackedEmbedding(self._library, matrix, torch.float32)
        return partial(F.embedding, weight=data)

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.NormFn:
        """RMS norm with one scale."""
        return RmsNorm(self._library, *self._rms_norm_args(norm, weight))

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNormFn:
        """RMS norm of a sum."""
        return AddRmsNorm(self._library, *self._rms_norm_args(norm, weight))

    def gated(self, act: spec.Activation) -> b.GatedActivationFn:
        """silu(gate) · up."""
        if act != "silu":
            raise Unsupported("only silu")
        return SiluMul(self._library)

    def rope(self, rope: spec.Rope, length: int) -> b.RopeFn:
        """Sine and cosine tables for every position."""
        return CpuRotaryEmbedding(rope, length, self.device, self._library)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Paged attention; calls that C cannot do go to the reference."""
        if attn.softcap is not None or not isinstance(rope, CpuRotaryEmbedding):
            raise Unsupported("only attention with RoPE of this backend and without softcap")
        if attn.head_dim % 16 or attn.head_dim > 512:
            raise Unsupported(f"head_dim {attn.head_dim} is no multiple of 16 up to 512")
        fallback = self._reference.attention(attn, rope)
        return PagedAttention(self._library, attn, rope, self._batch_args, fallback)

    def fused_linear(
        self,
        linears: Sequence[b.LinearFn],
        prologue: b.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> b.FusedLinear:
        """Matrices of this backend with an RMS norm before them, or two with silu after them."""
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        if len(packed) != len(linears) or act not in (None, "silu"):
            raise Unsupported("only packed matrices, and silu")
        scale, eps = (None, 0.0) if prologue is None else self._rms_norm_args(prologue.norm, prologue.weight)[:2]
        return FusedLinear(self._library, packed, scale, eps, act is not None)

    def _rms_norm_args(self, norm: spec.Norm, weight: Tensor) -> tuple[Tensor, float, b.NormFn]:
        if norm.kind != "rms" or weight.dim() != 1:
            raise Unsupported("only RMS norm with one scale")
        scale = (weight.float() + norm.offset).contiguous()
        return scale, norm.eps, self._reference.norm(norm, weight, None)

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("left to plain torch")

    activation = moe = _unsupported
