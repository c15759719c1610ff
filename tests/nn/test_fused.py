"""Blocks with fused projections: the same outputs and the same cache, by fewer products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.formats import DenseWeight
from exlm.kernels.interface import (
    AddNormFn,
    AttnMetadata,
    FusedDecoder,
    FusedLayer,
    FusedLinear,
    LayerKVCache,
    no_rope,
)
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Attention, Batch, Block, GatedMlp, Linear, LoraRef, ParallelBlock, QkvProjection
from exlm.nn.attention import no_qk_norm
from exlm.nn.block import BlockLike
from exlm.nn.fused import FusedAttention, FusedBlock, FusedMlp, fuse_block_stack

REFERENCE = ReferenceBackend(torch.device("cpu"), torch.float32)
HIDDEN, WIDTH = 32, 40
ATTN = spec.Attention(heads=4, kv_heads=2, head_dim=8, rope=None, scale=8**-0.5)
NORM = spec.Norm()
MAX_FUSED_TOKENS = 4


class CountingLinear(Linear):
    """A matrix that counts its calls."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = torch.randn(outputs, inputs) / inputs**0.5
        super().__init__(REFERENCE.linear(DenseWeight(self.weight)), inputs, outputs)
        self.num_calls = 0

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        self.num_calls += 1
        return super().forward(x, batch)


class SeparateMatrices(FusedLinear):
    """Several matrices as one product; fails when called fused."""

    def __init__(self, *parts: CountingLinear) -> None:
        self.sizes, self.merged_weight = (
            [part.out_features for part in parts],
            torch.cat([p.weight for p in parts]),
        )
        self.num_calls = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        raise AssertionError("many tokens must not run fused")

    def unfused(self, x: Tensor) -> list[Tensor]:
        self.num_calls += 1
        return list((x @ self.merged_weight.T).split_with_sizes(self.sizes, -1))


class SeparateCalls(FusedLinear):
    """Matrices whose raw products are their own calls, as the CPU's are; fails when called fused."""

    def __init__(self, *parts: CountingLinear) -> None:
        self.parts = parts

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        raise AssertionError("many tokens must not run fused")

    def unfused(self, x: Tensor) -> list[Tensor]:
        return [part.forward(x, batch(1)) for part in self.parts]


class LastKV:
    """A cache that keeps the last call's keys and values."""

    kv_pages = None
    state = None

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        self.k, self.v = k, v
        return k, v


def add_norm() -> AddNormFn:
    return REFERENCE.add_norm(NORM, torch.rand(HIDDEN), None)


class CountingLayer:
    """A layer of either form, and its matrices."""

    def __init__(self, parallel: bool = False) -> None:
        torch.manual_seed(7)
        self.q, self.k, self.v = (CountingLinear(HIDDEN, heads * 8) for heads in (4, 2, 2))
        self.o, self.down = CountingLinear(32, HIDDEN), CountingLinear(WIDTH, HIDDEN)
        self.gate, self.up = CountingLinear(HIDDEN, WIDTH), CountingLinear(HIDDEN, WIDTH)
        attend = REFERENCE.attention(ATTN, no_rope)
        attn = Attention(8, QkvProjection(self.q, self.k, self.v), no_qk_norm, attend, self.o)
        mlp = GatedMlp(REFERENCE.gated("silu"), self.gate, self.up, self.down)
        identity = lambda x: x  # noqa: E731
        self.block: Any = (
            ParallelBlock(attn, mlp, add_norm(), identity)
            if parallel
            else Block(attn, mlp, add_norm(), add_norm(), identity, identity)
        )

    def call_counts(self) -> list[int]:
        return [one.num_calls for one in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)]


def batch(tokens: int, adapters: Sequence[tuple[LoraRef, ...]] = ()) -> Batch:
    ids, none = torch.zeros(2, tokens, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    return Batch(
        ids=ids,
        positions=ids,
        past_lens=none,
        page_table=ids[:, :1],
        max_kv_len=tokens,
        uniform=True,
        adapters=tuple(adapters),
    )


def fused_attention_block(block: Block, qkv: FusedLinear, o: FusedLinear, mlp: FusedMlp | None) -> FusedBlock:
    assert isinstance(block.mixer, Attention)
    return FusedBlock(block, FusedAttention(block.mixer, qkv, o), mlp, MAX_FUSED_TOKENS)


def run(block: BlockLike, x: Tensor, forward_batch: Batch) -> tuple[Tensor, LastKV]:
    last_kv = LastKV()
    total, pending_residual = block.forward(x, x, forward_batch, last_kv)
    return total if pending_residual is None else total + pending_residual, last_kv


def test_many_tokens_use_separate_products() -> None:
    layer = CountingLayer()
    qkv, gate = SeparateMatrices(layer.q, layer.k, layer.v), SeparateMatrices(layer.gate, layer.up)
    fused = fused_attention_block(layer.block, qkv, qkv, FusedMlp(gate, gate))
    x = torch.randn(2, 6, HIDDEN)
    expected, expected_kv = run(layer.block, x, batch(6))
    assert layer.call_counts() == [1] * 7
    actual, actual_kv = run(fused, x, batch(6))
    assert layer.call_counts() == [1, 1, 1, 2, 1, 1, 2]
    assert (qkv.num_calls, gate.num_calls) == (1, 1)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close((actual_kv.k, actual_kv.v), (expected_kv.k, expected_kv.v))


def test_loras_see_every_matrix() -> None:
    layer = CountingLayer()
    fused_linear = SeparateMatrices(layer.q, layer.k, layer.v)
    fused = fused_attention_block(layer.block, fused_linear, fused_linear, FusedMlp(fused_linear, fused_linear))
    run(fused, torch.randn(2, 6, HIDDEN), batch(6, [(LoraRef(1, 1.0),)] * 2))
    assert layer.call_counts() == [1] * 7
    assert fused_linear.num_calls == 0


def test_attention_alone_is_fused_where_the_mlp_cannot_be() -> None:
    layer = CountingLayer()
    weight, attn = torch.rand(HIDDEN), layer.block.mixer
    layer.block.attn_norm = REFERENCE.add_norm(NORM, weight, None)
    norm = REFERENCE.norm(NORM, weight, None)

    class FusedQkv(FusedLinear):
        def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
            assert residual is None
            return [norm(x) @ one.weight.T for one in (layer.q, layer.k, layer.v)]

        def unfused(self, x: Tensor) -> list[Tensor]:
            raise AssertionError("few tokens run fused")

    class FusedOutput(FusedLinear):
        def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
            assert residual is not None
            return [x @ layer.o.weight.T + residual]

        def unfused(self, x: Tensor) -> list[Tensor]:
            raise AssertionError("few tokens run fused")

    fused = fused_attention_block(layer.block, FusedQkv(), FusedOutput(), None)
    x = torch.randn(2, 2, HIDDEN)
    expected, expected_kv = run(layer.block, x, batch(2))
    actual, actual_kv = run(fused, x, batch(2))
    assert layer.call_counts() == [1, 1, 1, 1, 2, 2, 2]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close((actual_kv.k, actual_kv.v), (expected_kv.k, expected_kv.v))
    assert fused.mixer is attn


@pytest.mark.parametrize("shape", ["plain", "parallel", "fused"])
def test_fill_kv_computes_attention_inputs_only(shape: str) -> None:
    layer = CountingLayer(shape == "parallel")
    block = layer.block
    if shape == "fused":
        qkv, gate_up = SeparateCalls(layer.q, layer.k, layer.v), SeparateCalls(layer.gate, layer.up)
        block = fused_attention_block(block, qkv, qkv, FusedMlp(gate_up, gate_up))
    x = torch.randn(2, 6, HIDDEN)
    _, want = run(block, x, batch(6))
    before, kept = layer.call_counts(), LastKV()
    block.fill_cache(x, x, batch(6), kept)
    assert torch.equal(kept.k, want.k)
    assert torch.equal(kept.v, want.v)
    assert [now - then for now, then in zip(layer.call_counts(), before, strict=True)] == [
        1,
        1,
        1,
        0,
        0,
        0,
        0,
    ]


class AddOne(FusedLayer):
    """A fused layer that adds 1, and with others as one if `fuses`."""

    def __init__(self, fuses: bool = True) -> None:
        self.fuses = fuses

    def __call__(self, x: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor:
        return x + 1

    def fuse_decoder(self, following: Sequence[FusedLayer]) -> FusedDecoder | None:
        count = 1 + len(following)
        return (lambda x, layers, metadata: x + count) if self.fuses else None


def fused_block(fused_layer: FusedLayer | None) -> FusedBlock:
    layer = CountingLayer(False)
    linear = SeparateCalls(layer.q)
    block = fused_attention_block(layer.block, linear, linear, FusedMlp(linear, linear))
    assert block.fused_layer is None, "the default of FusedLinear.fuse_layer"
    block.fused_layer = fused_layer
    return block


class NotFusable(FusedLayer):
    """A fused layer with the default `fuse_decoder`."""

    def __call__(self, x: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor:
        return x


def test_blocks_are_one_if_all_are_fused() -> None:
    fusable = [fused_block(AddOne()) for _ in range(3)]
    decoder = fuse_block_stack(fusable)
    assert decoder is not None
    x = torch.randn(2, 2, HIDDEN)
    got = decoder.forward(x, batch(2), [LastKV()] * 3)
    assert got is not None
    assert torch.equal(got, x + 3)
    others: list[list[BlockLike]] = [[], [*fusable, fusable[0].block], [*fusable, fused_block(None)]]
    others += [[fused_block(NotFusable()), *fusable], [fused_block(AddOne(fuses=False)), *fusable]]
    assert [fuse_block_stack(blocks) for blocks in others] == [None] * 5


@pytest.mark.parametrize("other", [batch(6), replace(batch(2), outputs="none"), batch(2, [(), ()])])
def test_a_fused_decoder_declines_other_batches(other: Batch) -> None:
    decoder = fuse_block_stack([fused_block(AddOne())] * 3)
    assert decoder is not None
    assert decoder.forward(torch.randn(2, 2, HIDDEN), other, [LastKV()] * 3) is None
