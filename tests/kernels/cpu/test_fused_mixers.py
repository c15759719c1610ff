"""Blocks of other mixers than plain attention with fused projections: the bits of the block itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from exlm import spec
from exlm.bench.synthetic import RandomTensors, synthetic_format
from exlm.errors import Unsupported
from exlm.kernels import interface as b
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.interface import StateSlots
from exlm.kvcache.dense import DenseLayer
from exlm.nn import (
    Attention,
    Batch,
    Block,
    ClampedQkv,
    DeltaNet,
    GatedAttention,
    GatedMlp,
    InOutMixer,
    Linear,
    LowRankLinear,
    PerHeadNorm,
    PlainMlp,
    QkvProjection,
)
from exlm.nn.fused import FusedBlock, fuse_block
from exlm.nn.recurrent import Mixer
from tests.kernels.cpu import test_recurrent as recurrent

CPU = torch.device("cpu")
HIDDEN, HEADS, DIM = 96, 2, 32
SLOTS = 4


class Layer:
    """A block, its norms' weights and its matrices, all of one backend."""

    def __init__(
        self, backend: CpuBackend, make_mixer: Callable[[Layer], tuple[Mixer, spec.StateShape | None]]
    ) -> None:
        torch.manual_seed(3)
        self.backend, self.count = backend, 0
        self.mixer, self.state = make_mixer(self)
        mlp = GatedMlp(backend.gated("silu"), self.linear(HIDDEN, 96), self.linear(HIDDEN, 96), self.linear(96, HIDDEN))
        self.norms = [b.NormPrologue(spec.Norm(), torch.rand(HIDDEN) + 0.5) for _ in range(2)]
        add_norms = [backend.add_norm(norm, weight, None) for norm, weight in self.norms]
        self.block = Block(self.mixer, mlp, *add_norms, lambda x: x, lambda x: x)

    def linear(self, inputs: int, outputs: int) -> Linear:
        self.count += 1
        weight = synthetic_format("gguf").weight(inputs, outputs, RandomTensors(self.count, CPU), False, inputs**-0.5)
        return Linear(self.backend.linear(weight), inputs, outputs)

    def fused(self) -> FusedBlock:
        return fuse_block(self.block, "silu", *self.norms, self.backend)

    def cache(self) -> DenseLayer:
        layer = DenseLayer(8, 16, 1, DIM, torch.float32, CPU)
        if self.state is not None:
            layer.allocate_state(self.state, SLOTS, torch.float32)
            for one in layer.state_tensors:
                one.fill_(0.25)
        for pages in layer.keys + layer.values:
            pages.zero_()
        return layer

    def attention_parts(self) -> tuple[QkvProjection, PerHeadNorm, b.AttentionFn]:
        attn = spec.Attention(HEADS, 1, DIM, spec.Rope(1e4, DIM), DIM**-0.5)
        qkv = QkvProjection(self.linear(HIDDEN, HEADS * DIM), self.linear(HIDDEN, DIM), self.linear(HIDDEN, DIM))
        norm = self.backend.norm(spec.Norm(), torch.rand(DIM) + 0.5, None)
        return qkv, PerHeadNorm(norm, norm), self.backend.attention(attn, self.backend.rope(attn.rope, 256))  # type: ignore[arg-type]


def delta_net(layer: Layer, rank: int | None = None) -> tuple[Mixer, spec.StateShape]:
    decay = "head" if rank is None else "channel"
    mixer = spec.DeltaNet(1, 2, 32, 16, 4, 1e-6, decay, gate_rank=rank)  # type: ignore[arg-type]
    kernel = recurrent.delta_net(mixer).bind(layer.backend)
    q, k, v, b_proj = (layer.linear(HIDDEN, n) for n in (mixer.key_width, mixer.key_width, mixer.value_width, 2))
    wide = mixer.value_width, mixer.decay_width
    if rank is None:
        z, a = (layer.linear(HIDDEN, n) for n in wide)
        return DeltaNet(kernel, q, k, v, z, a, b_proj, layer.linear(mixer.value_width, HIDDEN)), mixer.state
    low_z, low_a = (LowRankLinear(layer.linear(HIDDEN, rank), layer.linear(rank, n)) for n in wide)
    return DeltaNet(kernel, q, k, v, low_z, low_a, b_proj, layer.linear(mixer.value_width, HIDDEN)), mixer.state


def low_rank_delta_net(layer: Layer) -> tuple[Mixer, spec.StateShape]:
    return delta_net(layer, 32)


def mamba2(layer: Layer, in_scale: float = 1.0) -> tuple[Mixer, spec.StateShape]:
    mixer = spec.Mamba2(2, 32, 1, 48, 4, spec.Norm())
    kernel, width = recurrent.mamba2(mixer).bind(layer.backend), mixer.width + mixer.conv_channels + mixer.heads
    out = layer.linear(mixer.width, HIDDEN)
    return InOutMixer(kernel, layer.linear(HIDDEN, width), out, in_scale), mixer.state


def scaled_mamba2(layer: Layer) -> tuple[Mixer, spec.StateShape]:
    return mamba2(layer, 0.5)


def short_conv(layer: Layer) -> tuple[Mixer, spec.StateShape]:
    mixer = spec.ShortConv(HIDDEN, 3)
    kernel = recurrent.short_conv(mixer).bind(layer.backend)
    return InOutMixer(kernel, layer.linear(HIDDEN, 3 * HIDDEN), layer.linear(HIDDEN, HIDDEN)), mixer.state


def gated_attention(layer: Layer) -> tuple[Mixer, None]:
    width, parts = HEADS * DIM, layer.attention_parts()
    return GatedAttention(DIM, *parts, layer.linear(HIDDEN, width), layer.linear(width, HIDDEN)), None


def clamped_attention(layer: Layer) -> tuple[Mixer, None]:
    qkv, norm, attend = layer.attention_parts()
    return Attention(DIM, ClampedQkv(qkv, 0.5), norm, attend, layer.linear(HEADS * DIM, HIDDEN)), None


def batch(tokens: int, mask: torch.Tensor | None = None) -> Batch:
    """Two rows of new sequences, each with four pages."""
    ids = torch.arange(tokens).expand(2, -1).contiguous()
    targets = torch.full((2, tokens), -1)
    targets[:, -1] = torch.tensor([3, 2])
    return Batch(
        ids=ids,
        positions=ids,
        past_lens=torch.zeros(2, dtype=torch.long),
        page_table=torch.arange(8).view(2, 4),
        max_kv_len=tokens,
        uniform=mask is None,
        mask=mask,
        state_slots=StateSlots(torch.tensor([-1, 1]), targets),
    )


def outcome(block: Block | FusedBlock, layer: Layer, forward_batch: Batch) -> list[torch.Tensor]:
    """The residual stream, and what is in the cache."""
    torch.manual_seed(5)
    x, cache = torch.randn(2, 2, forward_batch.ids.shape[1], HIDDEN), layer.cache()
    total, pending = block.forward(x[0], x[1], forward_batch, cache)
    return [total if pending is None else total + pending, *cache.tensors, *cache.state_tensors]


FUSED = [delta_net, low_rank_delta_net, mamba2, short_conv, gated_attention]
IN_PARTS = [scaled_mamba2, clamped_attention]


@pytest.mark.parametrize("make", [*FUSED, *IN_PARTS])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_same_bits_as_the_block(
    backend: CpuBackend, make: Callable[[Layer], tuple[Mixer, spec.StateShape | None]], tokens: int
) -> None:
    layer = Layer(backend, make)
    fused = layer.fused()
    assert (fused.fused_mixer is not None) == (make in FUSED)
    assert fused.fused_mlp is not None
    want = outcome(layer.block, layer, batch(tokens))
    for max_tokens in (fused.max_tokens, 0):  # fused, then by `unfused` products
        block = FusedBlock(fused.block, fused.fused_mixer, fused.fused_mlp, max_tokens)
        found = outcome(block, layer, batch(tokens))
        assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True)), max_tokens


@pytest.mark.parametrize("make", FUSED)
def test_padding_and_filled_caches(
    backend: CpuBackend, make: Callable[[Layer], tuple[Mixer, spec.StateShape | None]]
) -> None:
    """Padding is zero for a recurrence, whatever the padding tokens' vectors are."""
    layer = Layer(backend, make)
    fused = layer.fused()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    want, found = (outcome(block, layer, batch(6, mask)) for block in (layer.block, fused))
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    caches, x = [layer.cache(), layer.cache()], torch.randn(2, 6, HIDDEN)
    for block, cache in zip((layer.block, fused), caches, strict=True):
        block.fill_cache(x, None, batch(6), cache)
    tensors = [cache.tensors + cache.state_tensors for cache in caches]
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


def test_experts_need_a_mixer_that_can_be_fused(backend: CpuBackend) -> None:
    layer = Layer(backend, clamped_attention)
    layer.block.mlp = PlainMlp(torch.relu, layer.linear(HIDDEN, 96), layer.linear(96, HIDDEN))
    with pytest.raises(Unsupported, match="clamped projections, and an MLP"):
        layer.fused()
    layer = Layer(backend, mamba2)
    layer.block.mlp = PlainMlp(torch.relu, layer.linear(HIDDEN, 96), layer.linear(96, HIDDEN))
    want, found = (outcome(block, layer, batch(3)) for block in (layer.block, layer.fused()))
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


def test_a_batch_with_loras_runs_the_modules(backend: CpuBackend) -> None:
    layer = Layer(backend, delta_net)
    fused, calls = layer.fused(), []
    mixer = layer.block.mixer
    assert isinstance(mixer, DeltaNet)
    inner = mixer.b
    mixer.b = Linear(lambda x: calls.append(1) or inner.kernel(x), HIDDEN, 2)  # type: ignore[func-returns-value]
    outcome(fused, layer, batch(4))
    assert not calls
    outcome(fused, layer, replace(batch(4), adapters=((), ())))
    assert calls
