"""Blocks and heads whose matrices a backend fuses with the norms, activations and residuals around them.

A backend's `FusedLinear` stands for matrices that share an input. Calling it runs the norm before and the
activation or residual after them too, which is fastest for few tokens; its `unfused` computes the products
alone, which is fastest for many. A batch with LoRAs runs the block's own modules, because a LoRA wraps those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from .. import spec
from ..errors import Unsupported
from ..kernels.interface import (
    FUSE_MAX_TOKENS,
    FusedDecoder,
    FusedLayer,
    FusedLinear,
    GatedActivationFn,
    LayerKVCache,
    NormPrologue,
    SupportsFusion,
)
from .attention import Attention, QkvProjection, no_qk_norm
from .batch import Batch
from .block import Block, BlockLike
from .linear import Head, Linear
from .mlp import GatedMlp, MlpLike, MoeMlp
from .recurrent import Mixer


class GateUpThenActivation(FusedLinear):
    """act(gate) · up made of two steps, for a backend that fuses both matrices but not this activation."""

    def __init__(self, gate_up: FusedLinear, act: GatedActivationFn) -> None:
        self.gate_up, self.act = gate_up, act

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """The gated product of x after the norm."""
        return [self.act(*self.gate_up(x, residual))]

    def unfused(self, x: Tensor) -> list[Tensor]:
        """The products with gate and up."""
        return self.gate_up.unfused(x)


class UnfusedQkv:
    """q, k and v by the matrices of a fused projection, without the norm that it fuses before them."""

    def __init__(self, qkv: FusedLinear) -> None:
        self.qkv = qkv

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, hidden) → three of (rows, tokens, heads · head_dim)."""
        q, k, v = self.qkv.unfused(x)
        return q, k, v


class UnfusedGateUpMlp:
    """A gated MLP by the matrices of a fused gate and up projection, without the norm and activation it fuses."""

    def __init__(self, mlp: GatedMlp, gate_up: FusedLinear) -> None:
        self.mlp, self.gate_up = mlp, gate_up

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        gate, up = self.gate_up.unfused(x)
        return self.mlp.down.forward(self.mlp.act(gate, up), batch)


class FusedMlp(NamedTuple):
    """A gated MLP in two launches: norm and act(gate) · up, then down and the residual."""

    gate_up: FusedLinear
    down: FusedLinear


class FusedBlock:
    """A `Block` with fused projections.

    A batch of few tokens runs through the fused projections, or through one kernel for the whole layer if the
    backend has one (`fused_layer`). A batch of many tokens runs through the block with `unfused` products, a batch
    with LoRAs through the block itself. The fused projections would ignore the replacement of a module, so
    `Decoder.replace` first puts the block back in this one's place.
    """

    def __init__(
        self, block: Block, attn: Attention, qkv: FusedLinear, o: FusedLinear, mlp: FusedMlp | None, max_tokens: int
    ) -> None:
        """`attn` is the mixer. Batches of at most `max_tokens` run fused; without `mlp` (MoE) the MLP does not."""
        self.block, self._attn = block, attn
        self.qkv, self.o, self.fused_mlp = qkv, o, mlp
        self.max_tokens = max_tokens
        self._unfused_block = _with_unfused_products(block, attn, qkv, mlp)
        self.fused_layer: FusedLayer | None = None
        if mlp is not None:
            norm = None if attn.norm is no_qk_norm else attn.norm
            self.fused_layer = qkv.fuse_layer(attn.attend, norm, o, *mlp)

    @property
    def mixer(self) -> Mixer:
        """The block's mixer, not fused."""
        return self.block.mixer

    @property
    def mlp(self) -> MlpLike:
        """The block's MLP, not fused."""
        return self.block.mlp

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in and out, as in `Block`."""
        if (block := self._block_for(batch)) is not None:
            return block.forward(x, pending_residual, batch, kv)
        x = x if pending_residual is None else x + pending_residual
        if self.fused_layer is not None and (output := self.fused_layer(x, kv, batch)) is not None:
            return output, None
        attn = self._attn
        shape = (*x.shape[:2], -1, attn.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv(x, None))
        q, k = attn.norm(q, k)
        (x,) = self.o(attn.attend(q, k, v, kv, batch), x)
        if self.fused_mlp is None:
            x, normed = self.block.mlp_norm(x, None)
            return x, self.block.mlp.forward(normed, batch)
        (hidden,) = self.fused_mlp.gate_up(x, None)
        (x,) = self.fused_mlp.down(hidden, x)
        return x, None

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store keys and values only. A batch of few tokens runs the whole layer, which takes hardly longer."""
        if batch.ids.numel() > FUSE_MAX_TOKENS or self._block_for(batch) is not None:
            (self.block if batch.adapters else self._unfused_block).fill_cache(x, pending_residual, batch, kv)
        else:
            self.forward(x, pending_residual, batch, kv)

    def _block_for(self, batch: Batch) -> Block | None:
        """The block that runs a batch with LoRAs or with many tokens; None for a batch that runs fused."""
        if batch.adapters:
            return self.block
        return self._unfused_block if batch.ids.numel() > self.max_tokens else None


def _with_unfused_products(block: Block, attn: Attention, qkv: FusedLinear, fused_mlp: FusedMlp | None) -> Block:
    """The block with the `unfused` products of matrices that share an input, for many tokens."""
    mlp = block.mlp
    attn = Attention(attn.head_dim, UnfusedQkv(qkv), attn.norm, attn.attend, attn.o)
    if fused_mlp is not None and isinstance(mlp, GatedMlp):
        mlp = UnfusedGateUpMlp(mlp, fused_mlp.gate_up)
    return Block(attn, mlp, block.attn_norm, block.mlp_norm, block.attn_post_norm, block.mlp_post_norm)


def fuse_block(
    block: Block, act: spec.Activation, attn_norm: NormPrologue, mlp_norm: NormPrologue, backend: SupportsFusion
) -> FusedBlock:
    """The block with the backend's fused projections; `Unsupported` if the backend declines one."""
    attn, mlp = block.mixer, block.mlp
    if type(attn) is not Attention:
        raise Unsupported("a mixer other than plain attention")
    qkv = attn.qkv
    if not isinstance(mlp, GatedMlp | MoeMlp) or not isinstance(qkv, QkvProjection):
        raise Unsupported("an MLP that is neither gated nor MoE, or clamped projections")

    def fused(
        *linears: Linear, prologue: NormPrologue | None = None, act: spec.Activation | None = None
    ) -> FusedLinear:
        return backend.fused_linear([linear.kernel for linear in linears], prologue, act)

    fused_qkv, fused_o = fused(qkv.q, qkv.k, qkv.v, prologue=attn_norm), fused(attn.o)
    fused_mlp = None
    if isinstance(mlp, GatedMlp):
        try:
            gate_up = fused(mlp.gate, mlp.up, prologue=mlp_norm, act=act)
        except Unsupported:
            gate_up = GateUpThenActivation(fused(mlp.gate, mlp.up, prologue=mlp_norm), mlp.act)
        fused_mlp = FusedMlp(gate_up, fused(mlp.down))
    return FusedBlock(block, attn, fused_qkv, fused_o, fused_mlp, backend.max_fused_tokens)


class FusedBlockStack:
    """All blocks in one kernel call, for batches that every one of them would run fused."""

    def __init__(self, kernel: FusedDecoder, max_tokens: int) -> None:
        self.kernel, self.max_tokens = kernel, max_tokens

    def forward(self, x: Tensor, batch: Batch, layers: Sequence[LayerKVCache]) -> Tensor | None:
        """The residual stream in and out; None for a batch that must run block by block."""
        if batch.adapters or batch.outputs == "none" or batch.ids.numel() > self.max_tokens:
            return None
        return self.kernel(x, layers, batch)


def fuse_block_stack(blocks: Sequence[BlockLike]) -> FusedBlockStack | None:
    """The blocks as one kernel call, if all are fused and their backend can do that; else None."""
    fused = [block for block in blocks if isinstance(block, FusedBlock)]
    layers = [block.fused_layer for block in fused if block.fused_layer is not None]
    if not layers or len(layers) < len(blocks):
        return None
    kernel = layers[0].fuse_decoder(layers[1:])
    return None if kernel is None else FusedBlockStack(kernel, min(block.max_tokens for block in fused))


def chain_fused_layers(blocks: Sequence[BlockLike]) -> None:
    """Have each whole-layer kernel also write its output in the form that the next layer's kernel reads."""
    for block, following in pairwise(blocks):
        if not isinstance(block, FusedBlock) or not isinstance(following, FusedBlock):
            continue
        if block.fused_layer is not None and following.fused_layer is not None:
            block.fused_layer.chain_to(following.fused_layer)


class FusedHead(Head):
    """A head whose matrix is fused with the norm before it, for few tokens without LoRAs.

    It runs as a plain head once its norm or matrix has been replaced.
    """

    def __init__(self, head: Head, fused_linear: FusedLinear, max_tokens: int) -> None:
        super().__init__(head.norm, head.linear, head.scale, head.softcap)
        self.fused_linear, self.max_tokens = fused_linear, max_tokens
        self._fused_parts = head.norm, head.linear

    def forward(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream → logits, and the state before the norm."""
        norm, linear = self._fused_parts
        unchanged = self.norm is norm and self.linear is linear
        if not unchanged or x.shape[0] * x.shape[1] > self.max_tokens or batch.adapters:
            return super().forward(x, pending_residual, batch)
        state = x if pending_residual is None else x + pending_residual
        (output,) = self.fused_linear(state, None)
        return self.scale_logits(output), state


def fuse_head(head: Head, norm: NormPrologue, backend: SupportsFusion) -> FusedHead:
    """The head with its norm as the matrix's prologue; `Unsupported` if the backend declines."""
    fused_linear = backend.fused_linear([head.linear.kernel], norm, None, fp32_out=True)
    return FusedHead(head, fused_linear, backend.max_fused_tokens)
