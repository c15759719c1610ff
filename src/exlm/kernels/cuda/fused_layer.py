"""A layer of few rows in five launches, each of which leaves its answers as the next one takes them.

What the last one leaves is for the following layer, which knows it again by the rows that come with it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import Unsupported
from .. import interface as b
from .attention import PagedDecodeAttention
from .gemm_dispatch import GemmDispatch
from .prepacked import PackedActs


class CudaFusedLayer(b.FusedLayer):
    """A layer's norms, matrices, attention and sums, where its attention is a kernel of ours."""

    def __init__(
        self,
        parts: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch],
        attend: PagedDecodeAttention,
        norm: b.QKNormFn | None,
    ) -> None:
        """`parts` are q, k and v; o; gate and up; and down. `norm` is that of queries and keys."""
        self.qkv, self.o, self.gate, self.down = self._parts = parts
        self._attend, self._norm = attend, norm
        for part in parts:
            _ = part.product.input_layout  # Unsupported now rather than later
        self._following: CudaFusedLayer | None = None
        self._left: MutableMapping[Tensor, tuple[PackedActs, int]] = WeakTensorKeyDictionary()

    def chain_to(self, following: b.FusedLayer) -> None:
        """Leave the answers for this layer as well."""
        if isinstance(following, CudaFusedLayer) and following.qkv.product.device == self.qkv.product.device:
            self._following = following

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor | None:
        """The residual stream behind the layer; None if its attention must be done otherwise."""
        rows, tokens = x.shape[:2]
        count, pages = rows * tokens, kv.kv_pages
        parts = [part.at(count) for part in self._parts]
        if pages is None or None in parts or not self._attend.takes(rows, tokens, kv, metadata):
            return None
        qkv, o, gate, down = (part for part in parts if part is not None)
        stream = x.reshape(count, -1).contiguous()
        answers = self.qkv.answers(count)
        qkv(self._expected(x) or stream, answers)
        q, k, v = (one.view(rows, tokens, -1, self._attend.attn.head_dim) for one in answers)
        if self._norm is not None:
            q, k = self._norm(q, k)
        heads = self.o.product.input_layout.open(count, 0)
        self._attend.leave(q, k, v, pages, metadata, heads)
        middle, normed = self.o.answers(count), self.gate.product.input_layout.open(count, o.shares)
        o(heads, middle, stream, normed)
        hidden = self.down.product.input_layout.open(count, 0)
        gate(normed, [], None, hidden)
        (out,), following = self.down.answers(count), self._following
        left = None if following is None else following.qkv.product.input_layout.open(count, down.shares)
        down(hidden, [out], middle[0], left)
        out = out.view(x.shape)
        if following is not None and left is not None:
            following.expect(out, left)
        return out

    def expect(self, x: Tensor, left: PackedActs) -> None:
        """Know that these rows have been left for it."""
        self._left[x] = left, _version(x)

    def _expected(self, x: Tensor) -> PackedActs | None:
        """What was left of these rows, unless they have been changed since."""
        if x not in self._left:
            return None
        left, version = self._left[x]
        del self._left[x]
        return left if version == _version(x) else None


def fuse_layer_kernels(
    parts: tuple[GemmDispatch, GemmDispatch, GemmDispatch, GemmDispatch], attend: b.AttentionFn, norm: b.QKNormFn | None
) -> CudaFusedLayer | None:
    """The layer as one, if its parts can leave their answers for each other."""
    if not isinstance(attend, PagedDecodeAttention):
        return None
    try:
        return CudaFusedLayer(parts, attend, norm)
    except Unsupported:
        return None


def _version(x: Tensor) -> int:
    """How often it was written to; nobody counts that in inference mode."""
    return 0 if x.is_inference() else x._version
