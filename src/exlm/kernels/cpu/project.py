"""Matrices with what stands around them as one call, for a few rows, and whole layers as one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import Unsupported
from ..backend import Attend, HeadPair, KeyValues, Project, Where
from .attention import FLOATS, PagedAttention
from .library import Library, Parts, Projection, check
from .linear import PackedLinear


class Together:
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
        self._held = tuple(matrices), scale
        self._outputs = [one.blocks.out_features for one in matrices][: 1 if gated else None]
        self.projection = Projection(
            *(matrices[n].blocks.address if n < len(matrices) else None for n in range(3)),
            *(None if scale is None else scale.data_ptr(), eps, len(matrices), int(gated)),
        )
        self._address = ctypes.addressof(self.projection)
        self._library = library

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(rows, tokens, inputs) → (rows, tokens, outputs) of each, the residual added to the first."""
        x = x.contiguous()
        rows, tokens = x.shape[:2]
        outs = [torch.empty(rows, tokens, width) for width in self._outputs]
        places = [out.data_ptr() for out in outs] + [None] * (3 - len(outs))
        more = None if residual is None else residual.contiguous()
        check(
            self._library.project(
                *(self._address, x.data_ptr(), None if more is None else more.data_ptr(), rows * tokens),
                *(*places, torch.get_num_threads()),
            )
        )
        return outs

    def compose(
        self, attend: Attend, norm: HeadPair | None, o: Project, gate: Project, down: Project
    ) -> WholeLayer | None:
        """The whole layer that these begin, if every part is of this kind."""
        parts = [part for part in (self, o, gate, down) if isinstance(part, Together)]
        if norm is not None or len(parts) < 4 or not isinstance(attend, PagedAttention):
            return None
        return WholeLayer(self._library, *parts, attend=attend)


class WholeLayer:
    """A layer's norms, matrices, attention and sums, for as few new tokens as its attention takes."""

    def __init__(
        self,
        library: Library,
        qkv: Together,
        o: Together,
        gate: Together,
        down: Together,
        *,
        attend: PagedAttention,
    ) -> None:
        self._held = qkv, o, gate, down
        self._attend = attend
        self._parts = Parts(*(part.projection for part in self._held))
        self._address = ctypes.addressof(self._parts)
        self._layer = library.layer

    def __call__(self, x: Tensor, kv: KeyValues, where: Where) -> Tensor | None:
        """The residual stream behind the layer; None if its attention must be done otherwise."""
        rows, tokens = x.shape[:2]
        call = self._attend.call((0, 0, 0), 0, rows, tokens, kv, where)
        if call is None or not x.is_contiguous():
            return None
        out = torch.empty_like(x)
        threads = torch.get_num_threads()
        check(self._layer(self._address, call + FLOATS, x.data_ptr(), out.data_ptr(), where.longest, threads))
        return out
