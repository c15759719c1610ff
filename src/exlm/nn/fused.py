"""Layers and the head in few launches.

For few rows norms, sums and nonlinearities are inside the matrices; for many, matrices that share an input
are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels import backend as b
from .attention import Attention, leave
from .batch import Batch
from .block import Block, BlockLike, MlpLike
from .head import Head
from .mlp import GatedMlp


class JoinedProjection:
    """Queries, keys and values of many rows, in one product."""

    def __init__(self, matrices: b.Broad) -> None:
        self.matrices = matrices

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """All at once."""
        q, k, v = self.matrices.plainly(x)
        return q, k, v


class JoinedMlp:
    """down(act(gate) · up) of many rows, gate and up in one product."""

    def __init__(self, mlp: GatedMlp, matrices: b.Broad) -> None:
        self.mlp, self.matrices = mlp, matrices

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        gate, up = self.matrices.plainly(x)
        return self.mlp.down.forward(self.mlp.act(gate, up), batch)


class Gated(NamedTuple):
    """An MLP in two launches: act(gate) · up, and what is made of it."""

    gate: b.Project
    down: b.Project


def joined(block: Block, qkv: b.Project, gated: Gated | None) -> Block:
    """The block for many rows: matrices that share an input are one, where their backend can do that."""
    attn, mlp = block.attn, block.mlp
    if isinstance(qkv, b.Broad):
        attn = Attention(attn.head_dim, JoinedProjection(qkv), attn.norm, attn.attend, attn.o)
    if gated is not None and isinstance(gated.gate, b.Broad) and isinstance(mlp, GatedMlp):
        mlp = JoinedMlp(mlp, gated.gate)
    return Block(attn, mlp, block.attn_norm, block.mlp_norm, block.attn_post, block.mlp_post)


class FusedBlock:
    """A `Block` that runs otherwise where that is quicker, and as itself for rows with adapters.

    Whoever replaces a module of the layer must put the plain block back in its place: what is fused does not
    look at modules.
    """

    def __init__(self, block: Block, qkv: b.Project, o: b.Project, gated: Gated | None, most: int) -> None:
        """`most` rows go the quick way, and all of it at once where the parts can be put together.

        Without `gated`, where there are experts, the MLP is the block's own.
        """
        self.block = block
        self.qkv, self.o, self.gated = qkv, o, gated
        self.most = most
        self.many = joined(block, qkv, gated)
        self.whole: b.Whole | None = None
        if gated is not None and isinstance(qkv, b.Composer):
            norm = None if block.attn.norm is leave else block.attn.norm
            self.whole = qkv.compose(block.attn.attend, norm, o, *gated)

    def lead(self, following: FusedBlock) -> None:
        """Have some of the following block's work done here, where both run as one and can do that."""
        if isinstance(self.whole, b.Leader) and following.whole is not None:
            self.whole.lead(following.whole)

    @property
    def attn(self) -> Attention:
        """The plain block's own."""
        return self.block.attn

    @property
    def mlp(self) -> MlpLike:
        """The plain block's own."""
        return self.block.mlp

    def forward(
        self, x: Tensor, more: Tensor | None, batch: Batch, kv: b.KeyValues
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in, the residual stream out."""
        if (plain := self._plain(batch)) is not None:
            return plain.forward(x, more, batch, kv)
        x = x if more is None else x + more
        if self.whole is not None and (done := self.whole(x, kv, batch)) is not None:
            return done, None
        attn = self.block.attn
        shape = (*x.shape[:2], -1, attn.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv(x, None))
        q, k = attn.norm(q, k)
        (x,) = self.o(attn.attend(q, k, v, kv, batch), x)
        if self.gated is None:
            x, n = self.block.mlp_norm(x, None)
            return x, self.block.mlp.forward(n, batch)
        (hidden,) = self.gated.gate(x, None)
        (x,) = self.gated.down(hidden, x)
        return x, None

    def remember(self, x: Tensor, more: Tensor | None, batch: Batch, kv: b.KeyValues) -> None:
        """What `forward` leaves in the cache. Few rows go all the way: it is hardly longer."""
        if batch.ids.numel() > b.FEW or self._plain(batch) is not None:
            (self.block if batch.adapters else self.many).remember(x, more, batch, kv)
        else:
            self.forward(x, more, batch, kv)

    def _plain(self, batch: Batch) -> Block | None:
        """Whose batch it is, if it is not one of few rows without adapters."""
        if batch.adapters:
            return self.block
        return self.many if batch.ids.numel() > self.most else None


class FusedStack:
    """All blocks at once, for the batches that every one of them would take whole."""

    def __init__(self, stack: b.Stack, most: int) -> None:
        self.stack, self.most = stack, most

    def forward(self, x: Tensor, batch: Batch, layers: Sequence[b.KeyValues]) -> Tensor | None:
        """The residual stream in and out; None if the blocks must be asked one by one."""
        if batch.adapters or batch.outputs == "none" or batch.ids.numel() > self.most:
            return None
        return self.stack(x, layers, batch)


def stacked(blocks: Sequence[BlockLike]) -> FusedStack | None:
    """The blocks as one, if all are fused and their backend can do that."""
    fused = [block for block in blocks if isinstance(block, FusedBlock)]
    first, *others = [block.whole for block in fused] or [None]
    if len(fused) < len(blocks) or None in others or not isinstance(first, b.Stacker):
        return None
    stack = first.stack([one for one in others if one is not None])
    return None if stack is None else FusedStack(stack, min(block.most for block in fused))


class FusedHead(Head):
    """A head whose norm is inside its matrix for few rows.

    Many rows and rows with adapters go the plain way, and so does everybody once a part was replaced.
    """

    def __init__(self, head: Head, project: b.Project, most: int) -> None:
        super().__init__(head.norm, head.linear, head.scale, head.softcap)
        self.project, self.most = project, most
        self._parts = head.norm, head.linear

    def forward(self, x: Tensor, more: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream → logits, and the state that enters the norm."""
        norm, linear = self._parts
        whole = self.norm is norm and self.linear is linear
        if not whole or x.shape[0] * x.shape[1] > self.most or batch.adapters:
            return super().forward(x, more, batch)
        state = x if more is None else x + more
        (answer,) = self.project(state, None)
        return self.finish(answer), state
