"""Blocks and heads whose matrices a backend fuses with the norms, activations and residuals around them.

A backend's `FusedLinear` stands for matrices that share an input. Calling it runs the norm before and the
activation or residual after them too, which is fastest for few tokens; its `unfused` computes the products
alone, which is fastest for many. A batch with LoRAs runs the block's own modules, because a LoRA wraps those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
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
from .attention import Attention, GatedAttention, QkvProjection, no_qk_norm
from .batch import Batch
from .block import Block, BlockLike
from .linear import Head, Linear
from .mlp import GatedMlp, MlpLike
from .recurrent import DeltaNet, InOutMixer, LowRankLinear, Mixer, with_zeroed_padding


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


class _FusedQkv:
    """q, k and v by a fused projection, of what is not yet normalised."""

    def __init__(self, qkv: FusedLinear) -> None:
        self.qkv = qkv

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, hidden) → three of (rows, tokens, heads · head_dim)."""
        q, k, v = self.qkv(x, None)
        return q, k, v


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


class FusedMixer(Protocol):
    """A mixer whose matrices are fused with the norm before it and the residual addition after it."""

    unfused: Mixer
    """The mixer without norm and residual, by `unfused` products: for many tokens."""

    accepts_padding: bool
    """Whether a batch with a mask may run fused: a recurrence needs zeros in place of padding, after the norm."""

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """The residual stream before the norm → the residual stream after the addition."""
        ...


class FusedAttention:
    """Attention between fused projections."""

    accepts_padding = True

    def __init__(self, attn: Attention, qkv: FusedLinear, o: FusedLinear) -> None:
        self.qkv, self.o = qkv, o
        self._attn = Attention(attn.head_dim, _FusedQkv(qkv), attn.norm, attn.attend, attn.o)
        self.unfused: Mixer = Attention(attn.head_dim, UnfusedQkv(qkv), attn.norm, attn.attend, attn.o)

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """The residual stream in and out."""
        (x,) = self.o(self._attn.head_outputs(x, batch, kv), x)
        return x

    def fuse_layer(self, mlp: FusedMlp) -> FusedLayer | None:
        """The whole layer as one, if the backend has a kernel for that."""
        norm = None if self._attn.norm is no_qk_norm else self._attn.norm
        return self.qkv.fuse_layer(self._attn.attend, norm, self.o, *mlp)


class FusedGatedAttention:
    """Attention with an output gate between fused projections."""

    accepts_padding = True

    def __init__(self, attn: GatedAttention, qkv: FusedLinear, gate: FusedLinear, o: FusedLinear) -> None:
        self.gate, self.o = gate, o
        parts = attn.norm, attn.attend
        self._attn = Attention(attn.head_dim, _FusedQkv(qkv), *parts, attn.o)
        self.unfused: Mixer = GatedAttention(attn.head_dim, UnfusedQkv(qkv), *parts, attn.gate, attn.o)

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """The residual stream in and out."""
        (gate,) = self.gate(x, None)
        (x,) = self.o(self._attn.head_outputs(x, batch, kv) * gate.sigmoid(), x)
        return x


class FusedDeltaNet:
    """A delta net between fused projections: q, k and v are one product, and z, a and b another.

    Of projections of low rank, the first matrices are fused.
    """

    accepts_padding = False

    def __init__(self, mixer: DeltaNet, qkv: FusedLinear, gates: FusedLinear, o: FusedLinear) -> None:
        self.mixer, self.qkv, self.gates, self.o = mixer, qkv, gates, o
        self.unfused: Mixer = UnfusedDeltaNet(mixer, qkv, gates)

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """The residual stream in and out."""
        (x,) = self.o(_delta_head_outputs(self.mixer, self.qkv(x, None), self.gates(x, None), batch, kv), x)
        return x


class UnfusedDeltaNet:
    """A delta net by the matrices of fused projections, without the norm that they fuse."""

    def __init__(self, mixer: DeltaNet, qkv: FusedLinear, gates: FusedLinear) -> None:
        self.mixer, self.qkv, self.gates = mixer, qkv, gates

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.mixer.o.forward(self._head_outputs(x, batch, kv), batch)

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store the state."""
        self._head_outputs(x, batch, kv)

    def _head_outputs(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        x = with_zeroed_padding(x, batch)
        return _delta_head_outputs(self.mixer, self.qkv.unfused(x), self.gates.unfused(x), batch, kv)


def _delta_head_outputs(
    mixer: DeltaNet, qkv: list[Tensor], gates: list[Tensor], batch: Batch, kv: LayerKVCache
) -> Tensor:
    """The heads' outputs, (rows, tokens, value width), from the products with the input."""
    z, a, b = gates
    if isinstance(mixer.z, LowRankLinear):
        z = mixer.z.up.forward(z, batch)
    if isinstance(mixer.a, LowRankLinear):
        a = mixer.a.up.forward(a, batch)
    return mixer.kernel(torch.cat(qkv, -1), z, a, b, kv.state, batch)


class FusedInOutMixer:
    """Mamba 2 or a short convolution between fused projections."""

    accepts_padding = False

    def __init__(self, mixer: InOutMixer, in_proj: FusedLinear, out_proj: FusedLinear) -> None:
        self.unfused: Mixer = mixer
        self.kernel, self.in_proj, self.out_proj = mixer.kernel, in_proj, out_proj

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """The residual stream in and out."""
        (projected,) = self.in_proj(x, None)
        (x,) = self.out_proj(self.kernel(projected, kv.state, batch), x)
        return x


class FusedBlock:
    """A `Block` with fused projections.

    A batch of few tokens runs through the fused projections, or through one kernel for the whole layer if the
    backend has one (`fused_layer`). A batch of many tokens runs through the block with `unfused` products, a batch
    with LoRAs through the block itself. The fused projections would ignore the replacement of a module, so
    `Decoder.replace` first puts the block back in this one's place.
    """

    def __init__(self, block: Block, mixer: FusedMixer | None, mlp: FusedMlp | None, max_tokens: int) -> None:
        """Batches of at most `max_tokens` run fused; a half of the block that is None runs as it does in `block`."""
        self.block, self.fused_mixer, self.fused_mlp = block, mixer, mlp
        self.max_tokens = max_tokens
        self._unfused_block = _with_unfused_products(block, mixer, mlp)
        self.fused_layer: FusedLayer | None = None
        if isinstance(mixer, FusedAttention) and mlp is not None:
            self.fused_layer = mixer.fuse_layer(mlp)

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
        if self.fused_mixer is None:
            x, normed = self.block.attn_norm(x, pending_residual)
            x = x + self.block.mixer.forward(normed, batch, kv)
        else:
            x = x if pending_residual is None else x + pending_residual
            if self.fused_layer is not None and (output := self.fused_layer(x, kv, batch)) is not None:
                return output, None
            x = self.fused_mixer.forward(x, batch, kv)
        if self.fused_mlp is None:
            x, normed = self.block.mlp_norm(x, None)
            return x, self.block.mlp.forward(normed, batch)
        (hidden,) = self.fused_mlp.gate_up(x, None)
        (x,) = self.fused_mlp.down(hidden, x)
        return x, None

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store keys, values and states only. A batch of few tokens runs the whole layer, which takes hardly longer."""
        if batch.ids.numel() > FUSE_MAX_TOKENS or self._block_for(batch) is not None:
            (self.block if batch.adapters else self._unfused_block).fill_cache(x, pending_residual, batch, kv)
        else:
            self.forward(x, pending_residual, batch, kv)

    def _block_for(self, batch: Batch) -> Block | None:
        """The block that runs a batch with LoRAs, many tokens or padding; None for a batch that runs fused."""
        if batch.adapters:
            return self.block
        mixer = self.fused_mixer
        needs_zeros = batch.mask is not None and mixer is not None and not mixer.accepts_padding
        if needs_zeros or batch.ids.numel() > self.max_tokens:
            return self._unfused_block
        return None


def _with_unfused_products(block: Block, mixer: FusedMixer | None, fused_mlp: FusedMlp | None) -> Block:
    """The block with the `unfused` products of matrices that share an input, for many tokens."""
    mlp = block.mlp
    if fused_mlp is not None and isinstance(mlp, GatedMlp):
        mlp = UnfusedGateUpMlp(mlp, fused_mlp.gate_up)
    unfused = block.mixer if mixer is None else mixer.unfused
    return Block(unfused, mlp, block.attn_norm, block.mlp_norm, block.attn_post_norm, block.mlp_post_norm)


def fuse_block(
    block: Block, act: spec.Activation, attn_norm: NormPrologue, mlp_norm: NormPrologue, backend: SupportsFusion
) -> FusedBlock:
    """The block with the backend's fused projections, around its mixer and in its MLP, or in one of them.

    `Unsupported` if the backend declines both, or a matrix of a gated MLP.
    """
    fuse = LinearFuser(backend)
    mixer, unfused_mixer = None, ""
    try:
        mixer = fuse_mixer(block.mixer, attn_norm, fuse)
    except Unsupported as reason:
        unfused_mixer = str(reason)  # the exception itself would keep this frame, and the weights, in memory
    if isinstance(block.mlp, GatedMlp):
        return FusedBlock(block, mixer, fuse_mlp(block.mlp, act, mlp_norm, fuse), backend.max_fused_tokens)
    if mixer is None:
        raise Unsupported(f"{unfused_mixer}, and an MLP without one gate")
    return FusedBlock(block, mixer, None, backend.max_fused_tokens)


class LinearFuser:
    """Fuses the matrices of `Linear` modules."""

    def __init__(self, backend: SupportsFusion) -> None:
        self.backend = backend

    def __call__(
        self, *linears: Linear, prologue: NormPrologue | None = None, act: spec.Activation | None = None
    ) -> FusedLinear:
        """The matrices as one; `Unsupported` if the backend declines."""
        return self.backend.fused_linear([linear.kernel for linear in linears], prologue, act)


def fuse_mixer(mixer: Mixer, norm: NormPrologue, fuse: LinearFuser) -> FusedMixer:
    """The mixer between fused projections, the norm before the first; `Unsupported` if it has others."""
    if isinstance(mixer, DeltaNet):
        z, a = (part.down if isinstance(part, LowRankLinear) else part for part in (mixer.z, mixer.a))
        if not isinstance(z, Linear) or not isinstance(a, Linear):
            raise Unsupported("gates that are not matrices")
        qkv = fuse(mixer.q, mixer.k, mixer.v, prologue=norm)
        return FusedDeltaNet(mixer, qkv, fuse(z, a, mixer.b, prologue=norm), fuse(mixer.o))
    if isinstance(mixer, InOutMixer) and mixer.in_scale == 1.0:
        return FusedInOutMixer(mixer, fuse(mixer.in_proj, prologue=norm), fuse(mixer.out_proj))
    if type(mixer) not in (Attention, GatedAttention) or not isinstance(mixer, Attention):
        raise Unsupported("a mixer with other parts")
    if not isinstance(mixer.qkv, QkvProjection):
        raise Unsupported("clamped projections")
    qkv = fuse(mixer.qkv.q, mixer.qkv.k, mixer.qkv.v, prologue=norm)
    if isinstance(mixer, GatedAttention):
        return FusedGatedAttention(mixer, qkv, fuse(mixer.gate, prologue=norm), fuse(mixer.o))
    return FusedAttention(mixer, qkv, fuse(mixer.o))


def fuse_mlp(mlp: GatedMlp, act: spec.Activation, norm: NormPrologue, fuse: LinearFuser) -> FusedMlp:
    """The MLP with the norm before it; `Unsupported` if the backend declines."""
    try:
        gate_up = fuse(mlp.gate, mlp.up, prologue=norm, act=act)
    except Unsupported:
        gate_up = GateUpThenActivation(fuse(mlp.gate, mlp.up, prologue=norm), mlp.act)
    return FusedMlp(gate_up, fuse(mlp.down))


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
        """The residual stream → logits, and the hidden state before the norm."""
        norm, linear = self._fused_parts
        unchanged = self.norm is norm and self.linear is linear
        if not unchanged or x.shape[0] * x.shape[1] > self.max_tokens or batch.adapters:
            return super().forward(x, pending_residual, batch)
        hidden = x if pending_residual is None else x + pending_residual
        (output,) = self.fused_linear(hidden, None)
        return self.scale_logits(output), hidden


def fuse_head(head: Head, norm: NormPrologue, backend: SupportsFusion) -> FusedHead:
    """The head with its norm as the matrix's prologue; `Unsupported` if the backend declines."""
    fused_linear = backend.fused_linear([head.linear.kernel], norm, None, fp32_out=True)
    return FusedHead(head, fused_linear, backend.max_fused_tokens)
