"""The CPU backend: packed matrices straight from their codes, and what lies between them, in float32.

Dense matrices take twelve or sixteen bits a number if theirs are such. Other dense ones, other norms and
gates, and attention over many new tokens are left to plain torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
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
from .attention import BatchPointers, PagedAttention, RopeTables
from .bf12 import pack_bf12
from .bindings import load
from .fused import FusedLinear
from .linear import PackedEmbedding, PackedLinear
from .narrow16 import narrow, pack_narrow
from .norm_act import AddRmsNorm, RmsNorm, SiluMul
from .packed import PackedMatrix, pack_matrix


class CpuBackend:
    """Packed matrices on this machine's processor."""

    name = "cpu"
    max_fused_tokens = sys.maxsize  # rows: prompts gain by it too

    def __init__(
        self, device: torch.device, dtype: torch.dtype, folder: Path, instructions: str | None = None
    ) -> None:
        if dtype is not torch.float32:
            raise Unsupported(f"computes in float32, not in {str(dtype).removeprefix('torch.')}")
        self.device = device
        self.dtype = dtype
        self._library = load(folder, instructions)
        self._reference = ReferenceBackend(device, dtype)
        self._batch_pointers = BatchPointers()
        self._arena = HugePageArena()
        self._tables: WeakKeyDictionary[Weight, PackedMatrix] = WeakKeyDictionary()  # perhaps also the head

    def linear(self, weight: Weight) -> b.LinearFn:
        """Packed weights, rearranged, and dense ones in few bits."""
        if weight in self._tables:
            return PackedLinear(self._library, self._tables[weight])
        threads = torch.get_num_threads()
        if isinstance(weight, PackedWeight):
            return PackedLinear(self._library, pack_matrix(weight, self._library, threads, self._arena))
        if isinstance(weight, DenseWeight):
            return PackedLinear(self._library, self._pack_dense(weight)[0])
        raise Unsupported("only packed and dense matrices")

    def embedding(self, weight: Weight) -> b.EmbeddingFn:
        """A table that may be the head's matrix as well: rearranged once."""
        if isinstance(weight, PackedWeight):
            matrix = pack_matrix(weight, self._library, torch.get_num_threads(), self._arena)
            self._tables[weight] = matrix
            return PackedEmbedding(self._library, matrix, weight.dtype)
        if not isinstance(weight, DenseWeight) or weight.data.dtype is not torch.float32:
            raise Unsupported("only packed tables, and those of a head")
        self._tables[weight], data = self._pack_dense(weight)
        if data is None:
            return PackedEmbedding(self._library, self._tables[weight], torch.float32)
        return partial(F.embedding, weight=data)

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.NormFn:
        """Root mean squares with one scale for all."""
        return RmsNorm(self._library, *self._rms(norm, weight))

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> b.AddNormFn:
        """The same behind an addition."""
        return AddRmsNorm(self._library, *self._rms(norm, weight))

    def gated(self, act: spec.Activation) -> b.GatedActivationFn:
        """Silu."""
        if act != "silu":
            raise Unsupported("only silu")
        return SiluMul(self._library)

    def rope(self, rope: spec.Rope, length: int) -> b.RopeFn:
        """Tables for every position."""
        return RopeTables(rope, length, self.device, self._library)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """A few new tokens over pages of floats or codes; everything else as the reference does."""
        if attn.softcap is not None or not isinstance(rope, RopeTables):
            raise Unsupported("only plain scores of heads that turn")
        if attn.head_dim % 16 or attn.head_dim > 512:
            raise Unsupported(f"heads of {attn.head_dim} numbers are no multiple of 16 up to 512")
        other = self._reference.attention(attn, rope)
        return PagedAttention(self._library, attn, rope, self._batch_pointers, other)

    def fused_linear(
        self,
        linears: Sequence[b.LinearFn],
        prologue: b.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> b.FusedLinear:
        """Packed matrices behind a root mean square norm, or two of them behind silu; always in full."""
        packed = [one for one in linears if isinstance(one, PackedLinear)]
        if len(packed) != len(linears) or act not in (None, "silu"):
            raise Unsupported("only packed matrices, and silu")
        scale, eps = (None, 0.0) if prologue is None else self._rms(prologue.norm, prologue.weight)[:2]
        return FusedLinear(self._library, packed, scale, eps, act is not None)

    def _pack_dense(self, weight: DenseWeight) -> tuple[PackedMatrix, Tensor | None]:
        """A dense matrix in as few bits as it needs, and its numbers if they lie there as they are."""
        threads = torch.get_num_threads()
        if self._library.prefers_bf12:
            with suppress(Unsupported):
                return pack_bf12(weight.data, weight.bias, self._library, threads, self._arena), None
        data = narrow(weight.data, self._library, threads, self._arena)
        return pack_narrow(data, weight.bias), data

    def _rms(self, norm: spec.Norm, weight: Tensor) -> tuple[Tensor, float, b.NormFn]:
        if norm.kind != "rms" or weight.dim() != 1:
            raise Unsupported("only root mean squares with one scale for all")
        scale = (weight.float() + norm.offset).contiguous()
        return scale, norm.eps, self._reference.norm(norm, weight, None)

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("left to plain torch")

    activation = moe = _declined
