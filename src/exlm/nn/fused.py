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
    AttnMetadata,
    FusedDecoder,
    FusedLayer,
    FusedLinear,
    GatedActivationFn,
    LayerKVCache,
    MixFn,
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


class FusedLinearGroup(FusedLinear):
    """Matrices that share an input, in several fused products, because a backend cannot fuse all of them."""

    def __init__(self, parts: Sequence[FusedLinear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """The output of each matrix."""
        first, *others = self._parts
        return [*first(x, residual), *(y for part in others for y in part(x, None))]

    def unfused(self, x: Tensor) -> list[Tensor]:
        """The product of x with each matrix."""
        return [y for part in self._parts for y in part.unfused(x)]

    def fuse_layer_around(
        self, mix: MixFn, o: FusedLinear, gate_up: FusedLinear, down: FusedLinear
    ) -> FusedLayer | None:
        """The layer by the backend of the first product; the other products are computed right before `mix`."""
        first, *others = self._parts

        def mix_all(
            products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
        ) -> tuple[Tensor, Tensor | None]:
            return mix([*products, *(y for part in others for y in part(x, None))], x, kv, metadata)

        return first.fuse_layer_around(mix_all, o, gate_up, down)


class FusedMixer(Protocol):
    """A mixer whose matrices are fused with the norm before it and the residual addition after it."""

    inputs: FusedLinear
    """The matrices that read the residual stream, after the norm."""

    o: FusedLinear

    unfused: Mixer
    """The mixer without norm and residual, by `unfused` products: for many tokens."""

    accepts_padding: bool
    """Whether a batch with a mask may run fused: a recurrence needs padding to be zeroed after the norm, which is part
    of the fused product."""

    def mix(
        self, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """A `MixFn`."""
        ...

    def fuse_layer(self, mlp: FusedMlp) -> FusedLayer | None:
        """The whole layer as one, if the backend has a kernel for that."""
        ...


class FusedAttention:
    """Attention, with or without an output gate, between fused projections."""

    accepts_padding = True

    def __init__(self, attn: Attention, inputs: FusedLinear, o: FusedLinear) -> None:
        """`inputs`: q, k, v, and the gate of a `GatedAttention`."""
        self.inputs, self.o = inputs, o
        self._attn = attn
        self.unfused: Mixer = UnfusedAttention(attn, inputs)

    def mix(
        self, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, and the logits of their gate."""
        return _attend(self._attn, products, x, kv, metadata)

    def fuse_layer(self, mlp: FusedMlp) -> FusedLayer | None:
        """The whole layer as one, if the backend has a kernel for that."""
        if isinstance(self._attn, GatedAttention):
            return self.inputs.fuse_layer_around(self.mix, self.o, *mlp)
        norm = None if self._attn.norm is no_qk_norm else self._attn.norm
        return self.inputs.fuse_layer(self._attn.attend, norm, self.o, *mlp)


class UnfusedAttention:
    """Attention by the matrices of a fused projection, without the norm that it fuses before them."""

    def __init__(self, attn: Attention, inputs: FusedLinear) -> None:
        self._attn, self._inputs = attn, inputs

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self._attn.o.forward(_gated(*self._mix(x, batch, kv)), batch)

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store keys and values."""
        self._mix(x, batch, kv)

    def _mix(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> tuple[Tensor, Tensor | None]:
        return _attend(self._attn, self._inputs.unfused(x), x, kv, batch)


def _attend(
    attn: Attention, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs, (rows, tokens, heads · head_dim), and the logits of their gate, from q, k, v and the gate."""
    q, k, v = (one.view(*x.shape[:2], -1, attn.head_dim) for one in products[:3])
    q, k = attn.norm(q, k)
    gate = products[3].view(*x.shape[:2], -1) if len(products) > 3 else None
    return attn.attend(q, k, v, kv, metadata), gate


def _gated(heads: Tensor, gate: Tensor | None) -> Tensor:
    """The heads' outputs times sigmoid(gate)."""
    return heads if gate is None else heads * gate.sigmoid()


class FusedDeltaNet:
    """A delta net between fused projections; of a projection of low rank, only the first matrix is fused."""

    accepts_padding = False

    def __init__(self, mixer: DeltaNet, inputs: FusedLinear, o: FusedLinear) -> None:
        """`inputs`: q, k, v, z, a, b."""
        self._mixer, self.inputs, self.o = mixer, inputs, o
        self.unfused: Mixer = UnfusedDeltaNet(mixer, inputs)

    def mix(
        self, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, normalised and gated."""
        return _delta_head_outputs(self._mixer, products, x, kv, metadata), None

    def fuse_layer(self, mlp: FusedMlp) -> FusedLayer | None:
        """The whole layer as one, if the backend has a kernel for that."""
        return self.inputs.fuse_layer_around(self.mix, self.o, *mlp)


class UnfusedDeltaNet:
    """A delta net by the matrices of fused projections, without the norm that they fuse."""

    def __init__(self, mixer: DeltaNet, inputs: FusedLinear) -> None:
        self._mixer, self._inputs = mixer, inputs

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self._mixer.o.forward(self._head_outputs(x, batch, kv), batch)

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store the state."""
        self._head_outputs(x, batch, kv)

    def _head_outputs(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        x = with_zeroed_padding(x, batch)
        return _delta_head_outputs(self._mixer, self._inputs.unfused(x), x, kv, batch)


def _delta_head_outputs(
    mixer: DeltaNet, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
) -> Tensor:
    """The heads' outputs, (rows, tokens, value width), from q, k, v, z, a, b."""
    q, k, v, z, a, b = (one.view(*x.shape[:2], -1) for one in products)
    if isinstance(mixer.z, LowRankLinear):
        z = mixer.z.up.kernel(z)
    if isinstance(mixer.a, LowRankLinear):
        a = mixer.a.up.kernel(a)
    return mixer.kernel(side_by_side((q, k, v)), z, a, b, kv.state, metadata)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated along their last dimension; a view if they already lie so in one wider tensor."""
    first, end = parts[0], parts[0].data_ptr()
    memory, rows = first.untyped_storage().data_ptr(), first.shape[:-1]
    for part in parts:
        strides = zip(part.stride(), first.stride(), (*rows, 2), strict=True)
        same_strides = all(mine == its for mine, its, size in strides if size > 1)  # of one row they are arbitrary
        if (
            part.stride(-1) != 1
            or part.shape[:-1] != rows
            or not same_strides
            or part.data_ptr() != end
            or part.untyped_storage().data_ptr() != memory
        ):
            return torch.cat(list(parts), -1)
        end += part.shape[-1] * part.element_size()
    return first.as_strided((*rows, sum(part.shape[-1] for part in parts)), first.stride())


class FusedInOutMixer:
    """Mamba 2 or a short convolution between fused projections."""

    accepts_padding = False

    def __init__(self, mixer: InOutMixer, in_proj: FusedLinear, out_proj: FusedLinear) -> None:
        self.unfused: Mixer = mixer
        self._kernel, self.inputs, self.o = mixer.kernel, in_proj, out_proj

    def mix(
        self, products: list[Tensor], x: Tensor, kv: LayerKVCache, metadata: AttnMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """The input of the output projection."""
        return self._kernel(products[0].view(*x.shape[:2], -1), kv.state, metadata), None

    def fuse_layer(self, mlp: FusedMlp) -> FusedLayer | None:
        """The whole layer as one, if the backend has a kernel for that."""
        return self.inputs.fuse_layer_around(self.mix, self.o, *mlp)


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
        if mixer is not None and mlp is not None:
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
            heads = _gated(*self.fused_mixer.mix(self.fused_mixer.inputs(x, None), x, kv, batch))
            (x,) = self.fused_mixer.o(heads, x)
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

    def group(self, *linears: Linear, prologue: NormPrologue) -> FusedLinear:
        """The matrices in as few fused products, in order, as the backend supports."""
        parts: list[FusedLinear] = []
        start = 0
        while start < len(linears):
            for end in range(len(linears), start, -1):
                try:
                    parts.append(self(*linears[start:end], prologue=prologue))
                    break
                except Unsupported:
                    if end == start + 1:
                        raise
            start = end
        return parts[0] if len(parts) == 1 else FusedLinearGroup(parts)


def fuse_mixer(mixer: Mixer, norm: NormPrologue, fuse: LinearFuser) -> FusedMixer:
    """The mixer between fused projections, the norm before the first; `Unsupported` if it has others."""
    if isinstance(mixer, DeltaNet):
        z, a = (part.down if isinstance(part, LowRankLinear) else part for part in (mixer.z, mixer.a))
        if not isinstance(z, Linear) or not isinstance(a, Linear):
            raise Unsupported("gates that are not matrices")
        inputs = fuse.group(mixer.q, mixer.k, mixer.v, z, a, mixer.b, prologue=norm)
        return FusedDeltaNet(mixer, inputs, fuse(mixer.o))
    if isinstance(mixer, InOutMixer) and mixer.in_scale == 1.0:
        return FusedInOutMixer(mixer, fuse(mixer.in_proj, prologue=norm), fuse(mixer.out_proj))
    if type(mixer) not in (Attention, GatedAttention) or not isinstance(mixer, Attention):
        raise Unsupported("a mixer with other parts")
    if not isinstance(mixer.qkv, QkvProjection):
        raise Unsupported("clamped projections")
    qkv = mixer.qkv.q, mixer.qkv.k, mixer.qkv.v
    if isinstance(mixer, GatedAttention):
        return FusedAttention(mixer, fuse.group(*qkv, mixer.gate, prologue=norm), fuse(mixer.o))
    return FusedAttention(mixer, fuse(*qkv, prologue=norm), fuse(mixer.o))


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
