"""Build a decoder's modules from a `spec.Model`, weight files and backends; families' quirks end here."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..errors import Unsupported
from ..formats import DenseWeight, Weight
from ..formats.host_buffers import release_pool, trim_heap
from ..kernels.dispatch import BackendList
from ..kernels.interface import (
    AddNormFn,
    AttentionFn,
    DeltaNetParams,
    Mamba2Params,
    NormFn,
    NormPrologue,
    QKNormFn,
    RopeFn,
    SupportsFusion,
    no_rope,
)
from ..memory import has_address_space
from ..nn import (
    AllHeadsNorm,
    Attention,
    Block,
    ClampedQkv,
    DeltaNet,
    Embedding,
    Expert,
    Experts,
    GatedAttention,
    GatedMlp,
    Head,
    InOutMixer,
    LatentAttention,
    LatentMoeMlp,
    LatentQkv,
    Linear,
    LowRankLinear,
    LowRankQuery,
    MixerBlock,
    MlpBlock,
    MoeMlp,
    ParallelBlock,
    ParallelMixers,
    PerHeadNorm,
    PlainMlp,
    QkvProjection,
    ScaledGatedMlp,
    SharedExpertMlp,
)
from ..nn.attention import Projection, Qkv, no_qk_norm
from ..nn.block import BlockLike, DeviceTransfer, TransferFn, no_transfer
from ..nn.fused import FusedBlock, FusedHead, chain_fused_layers, fuse_block, fuse_block_stack, fuse_head
from ..nn.mlp import MlpLike
from ..nn.recurrent import Mixer
from ..spec.model import Matrix, matrices
from .decoder import Decoder
from .devices import device_context

T = TypeVar("T")

MAX_IN_FLIGHT = 6
"""Most weights that are prefetched ahead of the one requested."""

IN_FLIGHT_DIVISOR = 48
"""Weights in flight may take one IN_FLIGHT_DIVISORth of the model's bytes."""

MAX_READER_THREADS = min(6, max(2, (os.cpu_count() or 1) // 2))
"""Reader threads: while one waits for the disk, another repacks. More would wait for each other."""

READER_ADDRESS_SPACE = 256 << 20
"""Address space of one reader: its stack, a malloc arena, its OpenMP threads."""


def identity_norm(x: Tensor) -> Tensor:
    return x


def add_without_norm(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x if y is None else x + y
    return total, total


def scaled_norm(inner: NormFn, factor: float) -> NormFn:
    """A norm with scaled output; the norm itself for a factor of 1."""
    return inner if factor == 1.0 else lambda x: inner(x) * factor


def module_index(role: str) -> int:
    """The number of the module that has a role: 0 is the embedding, i + 1 layer i, -1 the head."""
    match role.split("."):
        case ["embed"]:
            return 0
        case ["layers", layer, *_]:
            return int(layer) + 1
    return -1


@dataclass
class Builder:
    """Builds a model's modules one by one, so that the loader can report progress and stop between them."""

    model: spec.Model
    checkpoint: WeightSource
    module_backends: Sequence[BackendList]  # of the embedding, each layer, the head; the same object on one device
    max_seq_len: int
    has_embedding: bool = True  # False: another rank has the embedding
    has_head: bool = True  # False: another rank has the head
    _ropes: dict[tuple[int, spec.Rope], RopeFn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._matrices: dict[str, Matrix] = {matrix.role: matrix for matrix in matrices(self.model)}
        self._embedding_weight: Weight | None = None
        self._prefetcher: WeightPrefetcher[Callable[[], Linear]] | None = None
        self._cuda_streams: dict[torch.device, torch.cuda.Stream] = {}  # of the building thread

    def __len__(self) -> int:
        """Modules in all: the embedding, each layer, the head."""
        return len(self.model.layers) + 2

    def build(self) -> Iterator[Decoder]:
        """Yield the growing decoder after each module; the last one yielded is complete.

        The head is built with the embedding: it is the largest matrix and may be in memory twice while it is
        bound, which costs least before the layers are there.
        """
        first_roles = ["head"] if self.has_head and not self.tied else []
        roles = first_roles + [role for role in self._matrices if role != "head"]
        total = self.checkpoint.files.total_bytes
        devices = {backends.device for backends in self.module_backends}
        self._cuda_streams = {one: torch.cuda.current_stream(one) for one in devices if one.type == "cuda"}
        with WeightPrefetcher(self.read_linear, self.stored_bytes, roles, total) as self._prefetcher:
            embedding = self.embedding() if self.has_embedding else None
            with device_context(self.backends_for("head").device):
                head = self.head() if self.has_head else None
            self._embedding_weight = None  # bound by now, maybe repacked
            release_pool()
            decoder = Decoder(embedding, [], head, [])  # type: ignore[arg-type]  # None on a rank without it
            yield decoder
            for i, layer in enumerate(self.model.layers):
                decoder.blocks.append(self.block(i, layer))
                decoder.transfers.append(self.transfer_before(i))
                trim_heap()
                yield decoder
            decoder.transfers.append(self.transfer_before(len(self.model.layers)))
            if all(transfer is no_transfer for transfer in decoder.transfers):
                decoder.fused = fuse_block_stack(decoder.blocks)
            if decoder.fused is None:
                chain_fused_layers(decoder.blocks)
        self._prefetcher = None
        release_pool()
        yield decoder

    def backends_for(self, role: str) -> BackendList:
        """The backends of the module a role belongs to."""
        return self.module_backends[module_index(role)]

    def transfer_before(self, i: int) -> TransferFn:
        """What runs before block i or the head: a `DeviceTransfer` after a module on another device.

        Also before the first block, if another GPU than its own could be current then.
        """
        before, backends = self.module_backends[i : i + 2]
        first, devices = self.module_backends[0].device, {one.device for one in self.module_backends}
        starts_elsewhere = i == 0 and first.type == "cuda" and (len(devices) > 1 or first.index != 0)
        return DeviceTransfer(backends.device) if starts_elsewhere or backends is not before else no_transfer

    def embedding(self) -> Embedding:
        """The embedding, with learned positions if the model has them."""
        m, backends = self.model, self.backends_for("embed")
        if (restored := backends.restore("embed")) is not None:
            lookup, record = restored
            backends.records.append(record)
        else:
            weight = self.embedding_weight()
            lookup = backends.bind("embed", weight.describe(), lambda backend: backend.embedding(weight))
        positions = None
        if rows := m.embed.learned_positions:
            positions = self.checkpoint.tensor(
                "positions", (rows, m.hidden), dtype=backends.dtype, device=backends.device
            )
        residual_dtype = torch.float32 if m.fp32_residual else backends.dtype
        return Embedding(lookup, m.vocab, positions, m.embed.scale, residual_dtype)

    def embedding_weight(self) -> Weight:
        """The embedding's matrix, read once: in its stored dtype, unless it is also the head."""
        if self._embedding_weight is None:
            backends = self.backends_for("embed")
            is_head = self.tied and self.backends_for("head") is backends
            self._embedding_weight = self._read_embedding(backends.device, backends.dtype if is_head else None)
        return self._embedding_weight

    def _read_embedding(self, device: torch.device, dtype: torch.dtype | None) -> Weight:
        hidden, vocab = self.model.hidden, self.model.vocab
        return self.checkpoint.weight("embed", hidden, vocab, bias=False, dtype=dtype, device=device)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's matrix: the model ties them and the files have no head."""
        return self.model.head.tied and not self.checkpoint.has("head")

    def head(self) -> Head:
        """Final norm and LM head."""
        m = self.model
        linear = self.tied_linear() if self.tied else self.linear("head")
        norm = self.add_norm("final_norm", m.final_norm, m.hidden)
        head = Head(norm, linear, m.head.scale, m.head.softcap)
        fused = self.backends_for("head").fuse(
            "head.block", "a few rows", lambda backend: self.fused_head(head, backend)
        )
        return fused or head

    def tied_linear(self) -> Linear:
        """The embedding's matrix as the head's."""
        backends = self.backends_for("head")
        if (restored := backends.restore("head")) is None:
            return self.bind_linear("head", self.with_normalized_rows(self.tied_weight()))
        backends.records.append(restored[1])
        return Linear(restored[0], self.model.hidden, self.model.vocab)

    def fused_head(self, head: Head, backend: SupportsFusion) -> FusedHead:
        """The head with its norm fused; `Unsupported` if that is not possible."""
        if self.model.fp32_residual:
            raise Unsupported("a wider residual stream")
        return fuse_head(head, self.norm_prologue("final_norm", self.model.final_norm), backend)

    def with_normalized_rows(self, weight: Weight) -> Weight:
        """The head's matrix, with rows normalised if the model asks for that."""
        if not self.model.head.normalize_rows or not isinstance(weight, DenseWeight):
            return weight
        return DenseWeight(F.normalize(weight.data.float(), dim=1).to(weight.data.dtype), weight.bias)

    def tied_weight(self) -> Weight:
        """The embedding's matrix as the head's: the same, or a copy if the head is on another device."""
        backends = self.backends_for("head")
        if backends is self.backends_for("embed"):
            return self.embedding_weight()
        return self._read_embedding(backends.device, backends.dtype)

    def block(self, i: int, layer: spec.Layer) -> BlockLike:
        """One decoder layer in the form its description asks for."""
        prefix, hidden, scale = f"layers.{i}.", self.model.hidden, layer.residual_scale
        mixer = None if layer.mixer is None else self.mixer(prefix, layer.mixer)
        mlp = None if layer.mlp is None else self.mlp(prefix, layer.mlp)

        def add_norm(role: str, norm: spec.Norm | None) -> AddNormFn:
            return self.add_norm(prefix + role, norm, hidden)

        def post_norm(role: str, norm: spec.Norm | None) -> NormFn:
            return scaled_norm(self.norm(prefix + role, norm, hidden), scale)

        if mixer is None or mlp is None:
            if mixer is not None:
                post = post_norm("attn_post", layer.attn_post)
                return MixerBlock(mixer, add_norm("attn_norm", layer.attn_norm), post)
            assert mlp is not None  # families describe no empty layers
            return MlpBlock(mlp, add_norm("mlp_norm", layer.mlp_norm), post_norm("mlp_post", layer.mlp_post))
        if layer.parallel:
            attn_norm = add_norm("attn_norm", layer.attn_norm)
            return ParallelBlock(mixer, mlp, attn_norm, scaled_norm(identity_norm, scale))
        block = Block(
            mixer,
            mlp,
            attn_norm=add_norm("attn_norm", layer.attn_norm),
            mlp_norm=add_norm("mlp_norm", layer.mlp_norm),
            attn_post_norm=post_norm("attn_post", layer.attn_post),
            mlp_post_norm=post_norm("mlp_post", layer.mlp_post),
        )
        fused = self.backends_for(prefix).fuse(
            prefix + "block", "a few rows", lambda backend: self.fused_block(prefix, layer, block, backend)
        )
        return fused or block

    def fused_block(self, prefix: str, layer: spec.Layer, block: Block, backend: SupportsFusion) -> FusedBlock:
        """The layer with fused projections; `Unsupported` if it has parts that cannot be fused."""
        attn_norm, mlp_norm = layer.attn_norm, layer.mlp_norm
        if self.model.fp32_residual or layer.residual_scale != 1.0:
            raise Unsupported("a residual stream that is wider or scaled")
        if attn_norm is None or mlp_norm is None or layer.mlp is None or layer.attn_post or layer.mlp_post:
            raise Unsupported("norms in other places")
        if isinstance(layer.mlp, spec.Mlp) and layer.mlp.scaled:
            raise Unsupported("an MLP with scales")
        prologues = (
            self.norm_prologue(prefix + "attn_norm", attn_norm),
            self.norm_prologue(prefix + "mlp_norm", mlp_norm),
        )
        return fuse_block(block, layer.mlp.act, *prologues, backend)

    def norm_prologue(self, role: str, norm: spec.Norm) -> NormPrologue:
        """A norm over the hidden state, for fused matrices to apply to their input."""
        return NormPrologue(norm, self.norm_tensors(role, norm, self.model.hidden)[0])

    def mixer(self, prefix: str, mixer: spec.Mixer) -> Mixer:
        """The token mixer of one layer."""
        match mixer:
            case spec.Attention():
                return self.attention(prefix, mixer)
            case spec.LatentAttention():
                return self.latent_attention(prefix, mixer)
            case spec.DeltaNet():
                return self.delta_net(prefix, mixer)
            case spec.Mamba2():
                return self.mamba2(prefix, mixer)
            case spec.ShortConv():
                return self.short_conv(prefix, mixer)
            case spec.ParallelMixers():
                scales = mixer.attention_in_scale, mixer.attention_out_scale, mixer.recurrent_out_scale
                attention = self.attention(prefix, mixer.attention)
                return ParallelMixers(attention, self.mamba2(prefix, mixer.recurrent), scales)

    def attention(self, prefix: str, attn: spec.Attention) -> Attention:
        """Projections, QK norm, RoPE and attention kernel of one layer."""
        qkv: Qkv = QkvProjection(*(self.linear(f"{prefix}attn.{part}") for part in "qkv"))
        if attn.qkv_clip is not None:
            qkv = ClampedQkv(qkv, attn.qkv_clip)
        attend, qk_norm = self.attention_kernel(prefix, attn), self.qk_norm(prefix, attn)
        if attn.gated:
            gate = self.linear(prefix + "attn.gate")
            return GatedAttention(attn.head_dim, qkv, qk_norm, attend, gate, self.linear(prefix + "attn.o"))
        return Attention(attn.head_dim, qkv, qk_norm, attend, self.linear(prefix + "attn.o"))

    def attention_kernel(self, prefix: str, attn: spec.Attention) -> AttentionFn:
        """RoPE and attention over the layer's cache."""
        backends = self.backends_for(prefix)
        rope = self.rope(backends, attn.rope)
        window = f", window {attn.window}" if attn.window is not None else ""
        cap = f", cap {attn.softcap:g}" if attn.softcap is not None else ""
        detail = f"{attn.heads}/{attn.kv_heads} heads of {attn.head_dim}{window}{cap}"
        return backends.bind(prefix + "attn", detail, lambda backend: backend.attention(attn, rope))

    def latent_attention(self, prefix: str, attn: spec.LatentAttention) -> LatentAttention:
        """MLA: projections through latents, and the attention kernel over expanded heads."""

        def latent_norm(role: str, width: int) -> NormFn:
            return self.norm(prefix + role, spec.Norm(eps=attn.norm_eps), width)

        q: Projection
        if attn.q_rank is None:
            q = self.linear(prefix + "attn.q")
        else:
            down, norm = self.linear(prefix + "attn.q_down"), latent_norm("attn.q_latent_norm", attn.q_rank)
            q = LowRankQuery(down, norm, self.linear(prefix + "attn.q_up"))
        qkv = LatentQkv(
            (attn.kv_rank, attn.nope_dim, attn.rope_dim, attn.value_dim),
            q,
            self.linear(prefix + "attn.kv_down"),
            latent_norm("attn.kv_latent_norm", attn.kv_rank),
            self.linear(prefix + "attn.k_up"),
            self.linear(prefix + "attn.v_up"),
        )
        attend = self.attention_kernel(prefix, attn.expanded)
        return LatentAttention(attn.head_dim, attn.value_dim, qkv, attend, self.linear(prefix + "attn.o"))

    def delta_net(self, prefix: str, mixer: spec.DeltaNet) -> DeltaNet:
        """Projections and kernel of a gated delta net or of Kimi delta attention."""
        role = prefix + "delta."
        widths = {"q": mixer.key_width, "k": mixer.key_width, "v": mixer.value_width}
        params = DeltaNetParams(
            conv=self.conv_weight(role, widths, mixer.conv_kernel),
            a_log=self.parameter(role + "a_log", ((mixer.value_heads,), (1, 1, mixer.value_heads, 1))).flatten(),
            dt_bias=self.parameter(role + "dt_bias", (mixer.decay_width,)),
            norm=self.parameter(role + "norm", (mixer.value_dim,)),
        )
        detail = f"{mixer.key_heads}/{mixer.value_heads} heads of {mixer.key_dim} x {mixer.value_dim}"
        kernel = self.backends_for(prefix).bind(
            prefix + "delta", detail, lambda backend: backend.delta_net(mixer, params)
        )
        q, k, v = (self.linear(role + part) for part in "qkv")
        z, a = (self.projection(role + part, mixer.gate_rank) for part in "za")
        return DeltaNet(kernel, q, k, v, z, a, self.linear(role + "b"), self.linear(role + "o"))

    def projection(self, role: str, rank: int | None) -> Projection:
        """A matrix, or two of low rank."""
        if rank is None:
            return self.linear(role)
        return LowRankLinear(self.linear(role + "_down"), self.linear(role + "_up"))

    def mamba2(self, prefix: str, mixer: spec.Mamba2) -> InOutMixer:
        """Projections and kernel of a Mamba 2 mixer."""
        role, heads = prefix + "mamba.", (mixer.heads,)
        params = Mamba2Params(
            conv=self.conv_weight(role, {"x": mixer.conv_channels}, mixer.conv_kernel),
            conv_bias=self.parameter(role + "conv", (mixer.conv_channels,), "bias") if mixer.conv_bias else None,
            a_log=self.parameter(role + "a_log", heads),
            dt_bias=self.parameter(role + "dt_bias", heads),
            d=self.parameter(role + "d", heads),
            norm=None if mixer.norm is None else self.parameter(role + "norm", (mixer.width,)),
        )
        detail = f"{mixer.heads} heads of {mixer.head_dim} x {mixer.state_dim}"
        kernel = self.backends_for(prefix).bind(prefix + "mamba", detail, lambda backend: backend.mamba2(mixer, params))
        return InOutMixer(kernel, self.linear(role + "in"), self.linear(role + "out"), mixer.in_scale)

    def short_conv(self, prefix: str, mixer: spec.ShortConv) -> InOutMixer:
        """Projections and kernel of a short convolution."""
        role = prefix + "conv."
        weight = self.conv_weight(role, {"x": mixer.width}, mixer.conv_kernel)
        bias = self.parameter(role + "conv", (mixer.width,), "bias") if mixer.bias else None
        detail = f"{mixer.width} channels, kernel {mixer.conv_kernel}"
        kernel = self.backends_for(prefix).bind(
            prefix + "conv", detail, lambda backend: backend.short_conv(mixer, weight, bias)
        )
        return InOutMixer(kernel, self.linear(role + "in"), self.linear(role + "out"))

    def conv_weight(self, role: str, widths: dict[str, int], kernel: int) -> Tensor:
        """(channels, kernel) weights of a causal convolution: stored as one, or one for each part in this order."""
        parts = {"conv": sum(widths.values())}
        if len(widths) > 1 and self.checkpoint.has(f"{role}{next(iter(widths))}_conv"):
            parts = {f"{part}_conv": width for part, width in widths.items()}
        stored = (self.parameter(role + part, ((n, 1, kernel), (n, kernel))) for part, n in parts.items())
        return torch.cat([weight.view(-1, kernel) for weight in stored])

    def parameter(
        self, role: str, shape: tuple[int, ...] | tuple[tuple[int, ...], ...], suffix: str = "weight"
    ) -> Tensor:
        """A tensor that is no matrix, in float32 on its module's device."""
        stored = self.checkpoint.tensor(
            role, shape, dtype=torch.float32, device=torch.device("cpu"), suffix=suffix, finite=True
        )
        return stored.flatten().view(stored.shape).to(self.backends_for(role).device, non_blocking=True)

    def qk_norm(self, prefix: str, attn: spec.Attention) -> QKNormFn:
        if attn.qk_norm is None:
            return no_qk_norm
        q, k = prefix + "attn.q_norm", prefix + "attn.k_norm"
        norm, d = attn.qk_norm.norm, attn.head_dim
        if attn.qk_norm.scope == "all":
            return AllHeadsNorm(self.norm(q, norm, attn.heads * d), self.norm(k, norm, attn.kv_heads * d))
        return PerHeadNorm(self.norm(q, norm, d, heads=attn.heads), self.norm(k, norm, d, heads=attn.kv_heads))

    def mlp(self, prefix: str, mlp: spec.Mlp | spec.Moe) -> MlpLike:
        """Gated, plain or MoE."""
        return self.experts(prefix, mlp) if isinstance(mlp, spec.Moe) else self.dense_mlp(prefix + "mlp.", mlp)

    def dense_mlp(self, role: str, mlp: spec.Mlp) -> GatedMlp | PlainMlp:
        """Gated or plain; `role` ends with a dot."""
        up, down = self.linear(role + "up"), self.linear(role + "down")
        backends, name = self.backends_for(role), role[:-1]
        if not mlp.gated:
            act = backends.bind(name, mlp.act, lambda backend: backend.activation(mlp.act))
            return PlainMlp(act, up, down)
        gated_act = backends.bind(name, mlp.act, lambda backend: backend.gated(mlp.act))
        gate = self.linear(role + "gate")
        if mlp.scaled:
            return ScaledGatedMlp(gated_act, gate, up, down, mlp.gate_scale, mlp.out_scale)
        return GatedMlp(gated_act, gate, up, down)

    def experts(self, prefix: str, moe: spec.Moe) -> MoeMlp | SharedExpertMlp:
        """The router, the experts and the shared expert."""

        def expert_linears(part: str) -> list[Linear]:
            return [self.linear(f"{prefix}mlp.experts.{e}.{part}") for e in range(moe.experts)]

        gates = expert_linears("gate") if moe.gated else []
        ups, downs = expert_linears("up"), expert_linears("down")
        gate, up, down = ([linear.kernel for linear in part] for part in (gates, ups, downs))
        bias = self.parameter(prefix + "mlp.selection_bias", (moe.experts,)) if moe.selection_bias else None
        kernel = self.backends_for(prefix).bind(
            prefix + "mlp",
            f"{moe.active} of {moe.experts} experts",
            lambda backend: backend.moe(moe, gate, up, down, bias),
        )
        gate_or_none: Sequence[Linear | None] = gates or [None] * moe.experts
        experts = Experts(kernel, [Expert(*three) for three in zip(gate_or_none, ups, downs, strict=True)], bias)
        router = self.linear(prefix + "mlp.router")
        if moe.latent is None:
            routed = MoeMlp(router, experts)
        else:
            down_up = (self.linear(prefix + f"mlp.latent_{part}") for part in ("down", "up"))
            routed = LatentMoeMlp(router, experts, *down_up)
        if moe.shared is None:
            return routed
        shared_gate = self.linear(prefix + "mlp.shared_gate") if moe.shared_gated else None
        return SharedExpertMlp(routed, self.dense_mlp(prefix + "mlp.shared.", moe.shared), shared_gate)

    def rope(self, backends: BackendList, rope: spec.Rope | None) -> RopeFn:
        """RoPE of a layer; layers of a device with the same parameters share its tables."""
        if rope is None:
            return no_rope
        key = id(backends), rope
        if key not in self._ropes:
            detail = f"{rope.dim} dimensions, {self.max_seq_len} positions"
            self._ropes[key] = backends.bind("rope", detail, lambda backend: backend.rope(rope, self.max_seq_len))
        return self._ropes[key]

    def norm(self, role: str, norm: spec.Norm | None, width: int, heads: int | None = None) -> NormFn:
        """A bound norm, or the identity. QK norms have one scale, or one for each head."""
        if norm is None:
            return identity_norm
        weight, bias = self.norm_tensors(role, norm, width, heads)
        return self.backends_for(role).bind(role, norm.kind, lambda backend: backend.norm(norm, weight, bias))

    def add_norm(self, role: str, norm: spec.Norm | None, width: int) -> AddNormFn:
        """A bound norm with the residual addition before it, or the addition alone."""
        if norm is None:
            return add_without_norm
        weight, bias = self.norm_tensors(role, norm, width)
        return self.backends_for(role).bind(role, norm.kind, lambda backend: backend.add_norm(norm, weight, bias))

    def norm_tensors(
        self, role: str, norm: spec.Norm, width: int, heads: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A norm's scale and bias.

        They are small: checked on the CPU, then copied asynchronously.
        """

        def load_tensor(suffix: str, *shapes: tuple[int, ...]) -> Tensor:
            stored = self.checkpoint.tensor(
                role, shapes, dtype=torch.float32, device=torch.device("cpu"), suffix=suffix, finite=True
            )
            return stored.to(self.backends_for(role).device, non_blocking=True)

        allowed_shapes = ((width,),) if heads is None else ((width,), (heads, width))
        return load_tensor("weight", *allowed_shapes), load_tensor("bias", (width,)) if norm.bias else None

    def linear(self, role: str) -> Linear:
        """A matrix, read and bound; prefetched while `build` runs."""
        finish = self.read_linear(role) if self._prefetcher is None else self._prefetcher.take(role)
        return finish()

    def read_linear(self, role: str) -> Callable[[], Linear]:
        """Read and, if possible, bind a matrix in a reader thread; returns the building thread's part.

        The reader thread uses the builder's CUDA stream, so that copies and kernels of both threads are
        ordered. Kernels whose binding needs much memory are bound by the building thread, one after the
        other.
        """
        backends = self.backends_for(role)
        stream = self._cuda_streams.get(backends.device)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if (restored := backends.restore(role)) is not None:
                kernel, record = restored
                _, in_features, out_features, _ = self._matrices[role]
            else:
                weight = self.read_weight(role)
                if not backends.can_bind_concurrently:
                    return partial(self.bind_linear, role, weight)
                kernel, record = backends.dispatch(role, weight.describe(), lambda backend: backend.linear(weight))
                in_features, out_features = weight.in_features, weight.out_features  # a shard's

        def finish() -> Linear:
            backends.records.append(record)  # here, so that records are in the model's order
            return Linear(kernel, in_features, out_features)

        return finish

    def bind_linear(self, role: str, weight: Weight) -> Linear:
        """Bind a weight to a kernel."""
        kernel = self.backends_for(role).bind(role, weight.describe(), lambda backend: backend.linear(weight))
        return Linear(kernel, weight.in_features, weight.out_features)

    def stored_bytes(self, role: str) -> int:
        """A matrix's stored bytes; a head that the files lack is the embedding."""
        return self.checkpoint.describe(role, "embed" if role == "head" else None)[1]

    def read_weight(self, role: str) -> Weight:
        """A matrix from the files, on its module's device."""
        _, in_features, out_features, bias = self._matrices[role]
        backends = self.backends_for(role)
        weight = self.checkpoint.weight(
            role, in_features, out_features, bias=bias, dtype=backends.dtype, device=backends.device
        )
        return self.with_normalized_rows(weight) if role == "head" else weight


class WeightPrefetcher(Generic[T]):
    """Loads a queue of weights in reader threads, a few ahead of the builder.

    Without threads, `take` loads the weight in the calling thread.
    """

    def __init__(
        self, load: Callable[[str], T], size: Callable[[str], int], roles: Iterable[str], total_bytes: int
    ) -> None:
        self._load = load
        self._size = cache(size)
        self._queue = deque(roles)
        self._max_bytes = total_bytes // IN_FLIGHT_DIVISOR
        self._in_flight: dict[str, tuple[Future[T], int]] = {}  # with its bytes
        threads = num_reader_threads(total_bytes)
        self._executor = ThreadPoolExecutor(threads, "exlm-read") if threads else None

    def __enter__(self) -> Self:
        try:
            self._submit_more()
        except BaseException:  # a thread could not start: Python does not call `__exit__`
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._in_flight.clear()

    def take(self, role: str) -> T:
        """The weight of a role, or the error of loading it; each role once."""
        if self._executor is None:
            return self._load(role)
        while role not in self._in_flight:
            next_role = self._queue.popleft() if self._queue else role
            self._submit(self._executor, next_role, self._size(next_role))
        self._submit_more()
        return self._in_flight.pop(role)[0].result()

    def _submit_more(self) -> None:
        """Submit weights while few enough, and few enough bytes, are in flight."""
        while self._executor is not None and self._queue and len(self._in_flight) <= MAX_IN_FLIGHT:
            size = self._size(self._queue[0])
            if sum(nbytes for _, nbytes in self._in_flight.values()) + size > self._max_bytes:
                return
            self._submit(self._executor, self._queue.popleft(), size)

    def _submit(self, executor: ThreadPoolExecutor, role: str, size: int) -> None:
        self._in_flight[role] = executor.submit(self._load, role), size


def num_reader_threads(total: int) -> int:
    """Threads for a model of `total` bytes: none if the address space is too small for both."""
    return MAX_READER_THREADS if has_address_space(2 * total + MAX_READER_THREADS * READER_ADDRESS_SPACE) else 0
