"""Layers and the head in few launches.

For few rows norms, sums and nonlinearities are inside the matrices; for many, matrices that share an input
are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels import interface as b
from .attention import Attention, no_qk_norm
from .batch import Batch
from .block import Block, BlockLike, MlpLike
from .head import Head
from .mlp import GatedMlp


class MergedQkvProjection:
    """Queries, keys and values of many rows, in one product."""

    def __init__(self, matrices: b.SupportsDequantGemm) -> None:
        self.matrices = matrices

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """All at once."""
        q, k, v = self.matrices.dequant_gemm(x)
        return q, k, v


class MergedGateUpMlp:
    """down(act(gate) · up) of many rows, gate and up in one product."""

    def __init__(self, mlp: GatedMlp, matrices: b.SupportsDequantGemm) -> None:
        self.mlp, self.matrices = mlp, matrices

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        gate, up = self.matrices.dequant_gemm(x)
        return self.mlp.down.forward(self.mlp.act(gate, up), batch)


class FusedMlp(NamedTuple):
    """An MLP in two launches: act(gate) · up, and what is made of it."""

    gate: b.FusedLinear
    down: b.FusedLinear


def merged_block(block: Block, qkv: b.FusedLinear, fused_mlp: FusedMlp | None) -> Block:
    """The block for many rows: matrices that share an input are one, where their backend can do that."""
    attn, mlp = block.attn, block.mlp
    if isinstance(qkv, b.SupportsDequantGemm):
        attn = Attention(attn.head_dim, MergedQkvProjection(qkv), attn.norm, attn.attend, attn.o)
    if (
        fused_mlp is not None
        and isinstance(fused_mlp.gate, b.SupportsDequantGemm)
        and isinstance(mlp, GatedMlp)
    ):
        mlp = MergedGateUpMlp(mlp, fused_mlp.gate)
    return Block(attn, mlp, block.attn_norm, block.mlp_norm, block.attn_post_norm, block.mlp_post_norm)


class FusedBlock:
    """A `Block` that runs otherwise where that is quicker, and as itself for rows with adapters.

    Whoever replaces a module of the layer must put the plain block back in its place: what is fused does not
    look at modules.
    """

    def __init__(
        self, block: Block, qkv: b.FusedLinear, o: b.FusedLinear, fused_mlp: FusedMlp | None, max_tokens: int
    ) -> None:
        """`most` rows go the quick way, and all of it at once where the parts can be put together.

        Without `gated`, where there are experts, the MLP is the block's own.
        """
        self.block = block
        self.qkv, self.o, self.fused_mlp = qkv, o, fused_mlp
        self.max_tokens = max_tokens
        self.merged = merged_block(block, qkv, fused_mlp)
        self.fused_layer: b.FusedLayer | None = None
        if fused_mlp is not None and isinstance(qkv, b.SupportsLayerFusion):
            norm = None if block.attn.norm is no_qk_norm else block.attn.norm
            self.fused_layer = qkv.fuse_layer(block.attn.attend, norm, o, *fused_mlp)

    def link_next(self, following: FusedBlock) -> None:
        """Have some of the following block's work done here, where both run as one and can do that."""
        if isinstance(self.fused_layer, b.SupportsLayerChaining) and following.fused_layer is not None:
            self.fused_layer.chain_to(following.fused_layer)

    @property
    def attn(self) -> Attention:
        """The plain block's own."""
        return self.block.attn

    @property
    def mlp(self) -> MlpLike:
        """The plain block's own."""
        return self.block.mlp

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in, the residual stream out."""
        if (unfused := self._unfused_block(batch)) is not None:
            return unfused.forward(x, pending_residual, batch, kv)
        x = x if pending_residual is None else x + pending_residual
        if self.fused_layer is not None and (output := self.fused_layer(x, kv, batch)) is not None:
            return output, None
        attn = self.block.attn
        shape = (*x.shape[:2], -1, attn.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv(x, None))
        q, k = attn.norm(q, k)
        (x,) = self.o(attn.attend(q, k, v, kv, batch), x)
        if self.fused_mlp is None:
            x, n = self.block.mlp_norm(x, None)
            return x, self.block.mlp.forward(n, batch)
        (hidden,) = self.fused_mlp.gate(x, None)
        (x,) = self.fused_mlp.down(hidden, x)
        return x, None

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache) -> None:
        """What `forward` leaves in the cache. Few rows go all the way: it is hardly longer."""
        if batch.ids.numel() > b.FUSE_MAX_TOKENS or self._unfused_block(batch) is not None:
            (self.block if batch.adapters else self.merged).fill_kv(x, pending_residual, batch, kv)
        else:
            self.forward(x, pending_residual, batch, kv)

    def _unfused_block(self, batch: Batch) -> Block | None:
        """Whose batch it is, if it is not one of few rows without adapters."""
        if batch.adapters:
            return self.block
        return self.merged if batch.ids.numel() > self.max_tokens else None


class FusedStack:
    """All blocks at once, for the batches that every one of them would take whole."""

    def __init__(self, stack: b.FusedDecoder, max_tokens: int) -> None:
        self.stack, self.max_tokens = stack, max_tokens

    def forward(self, x: Tensor, batch: Batch, layers: Sequence[b.LayerKVCache]) -> Tensor | None:
        """The residual stream in and out; None if the blocks must be asked one by one."""
        if batch.adapters or batch.outputs == "none" or batch.ids.numel() > self.max_tokens:
            return None
        return self.stack(x, layers, batch)


def fuse_stack(blocks: Sequence[BlockLike]) -> FusedStack | None:
    """The blocks as one, if all are fused and their backend can do that."""
    fused = [block for block in blocks if isinstance(block, FusedBlock)]
    first, *others = [block.fused_layer for block in fused] or [None]
    if len(fused) < len(blocks) or None in others or not isinstance(first, b.SupportsDecoderFusion):
        return None
    stack = first.fuse_decoder([one for one in others if one is not None])
    return None if stack is None else FusedStack(stack, min(block.max_tokens for block in fused))


class FusedHead(Head):
    """A head whose norm is inside its matrix for few rows.

    Many rows and rows with adapters go the plain way, and so does everybody once a part was replaced.
    """

    def __init__(self, head: Head, project: b.FusedLinear, max_tokens: int) -> None:
        super().__init__(head.norm, head.linear, head.scale, head.softcap)
        self.project, self.max_tokens = project, max_tokens
        self._fused_parts = head.norm, head.linear

    def forward(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream → logits, and the state that enters the norm."""
        norm, linear = self._fused_parts
        unchanged = self.norm is norm and self.linear is linear
        if not unchanged or x.shape[0] * x.shape[1] > self.max_tokens or batch.adapters:
            return super().forward(x, pending_residual, batch)
        state = x if pending_residual is None else x + pending_residual
        (output,) = self.project(state, None)
        return self.scale_logits(output), state
