"""Layers whose matrices are joined for many rows: the same answers and the same cache, by fewer products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.formats import DenseWeight
from exlm.kernels import interface as b
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Attention, Batch, Block, GatedMlp, Linear, LoraRef, ParallelBlock, QkvProjection
from exlm.nn.attention import no_qk_norm
from exlm.nn.block import BlockLike
from exlm.nn.fused import FusedBlock, FusedMlp, fuse_stack

REFERENCE = ReferenceBackend(torch.device("cpu"), torch.float32)
HIDDEN, WIDTH = 32, 40
ATTN = spec.Attention(heads=4, kv_heads=2, head_dim=8, rope=None, scale=8**-0.5)
NORM = spec.Norm()
MAX_FUSED_TOKENS = 4


class CountingLinear(Linear):
    """A matrix that knows how often it was asked."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = torch.randn(outputs, inputs) / inputs**0.5
        super().__init__(REFERENCE.linear(DenseWeight(self.weight)), inputs, outputs)
        self.num_calls = 0

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        self.num_calls += 1
        return super().forward(x, batch)


class MergedMatrices:
    """Several of them as one, for many rows only."""

    def __init__(self, *parts: CountingLinear) -> None:
        self.sizes, self.merged_weight = (
            [part.out_features for part in parts],
            torch.cat([p.weight for p in parts]),
        )
        self.num_calls = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        raise AssertionError("these are many rows")

    def dequant_gemm(self, x: Tensor) -> list[Tensor]:
        self.num_calls += 1
        return list((x @ self.merged_weight.T).split_with_sizes(self.sizes, -1))


class LastKV:
    """A cache of what was stored last."""

    paged = None

    def update(self, k: Tensor, v: Tensor, metadata: b.AttnMetadata) -> tuple[Tensor, Tensor]:
        self.k, self.v = k, v
        return k, v


def add_norm() -> b.AddNormFn:
    return REFERENCE.add_norm(NORM, torch.rand(HIDDEN), None)


class CountingLayer:
    """A layer of either shape, and its matrices."""

    def __init__(self, parallel: bool = False) -> None:
        torch.manual_seed(7)
        self.q, self.k, self.v = (CountingLinear(HIDDEN, heads * 8) for heads in (4, 2, 2))
        self.o, self.down = CountingLinear(32, HIDDEN), CountingLinear(WIDTH, HIDDEN)
        self.gate, self.up = CountingLinear(HIDDEN, WIDTH), CountingLinear(HIDDEN, WIDTH)
        attend = REFERENCE.attention(ATTN, b.no_rope)
        attn = Attention(8, QkvProjection(self.q, self.k, self.v), no_qk_norm, attend, self.o)
        mlp = GatedMlp(REFERENCE.gated("silu"), self.gate, self.up, self.down)
        same = lambda x: x  # noqa: E731
        self.block: Any = (
            ParallelBlock(attn, mlp, add_norm(), same)
            if parallel
            else Block(attn, mlp, add_norm(), add_norm(), same, same)
        )

    def call_counts(self) -> list[int]:
        return [one.num_calls for one in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)]


def batch(tokens: int, adapters: Sequence[tuple[LoraRef, ...]] = ()) -> Batch:
    ids, none = torch.zeros(2, tokens, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    return Batch(ids, ids, none, ids[:, :1], tokens, uniform=True, adapters=tuple(adapters))


def run(block: BlockLike, x: Tensor, forward_batch: Batch) -> tuple[Tensor, LastKV]:
    last_kv = LastKV()
    total, pending_residual = block.forward(x, x, forward_batch, last_kv)
    return total if pending_residual is None else total + pending_residual, last_kv


def test_many_rows_use_merged_matrices() -> None:
    layer = CountingLayer()
    qkv, gate = MergedMatrices(layer.q, layer.k, layer.v), MergedMatrices(layer.gate, layer.up)
    fused = FusedBlock(layer.block, qkv, qkv, FusedMlp(gate, gate), MAX_FUSED_TOKENS)
    x = torch.randn(2, 6, HIDDEN)
    want, want_kept = run(layer.block, x, batch(6))
    assert layer.call_counts() == [1] * 7
    got, kept = run(fused, x, batch(6))
    assert layer.call_counts() == [1, 1, 1, 2, 1, 1, 2]
    assert (qkv.num_calls, gate.num_calls) == (1, 1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((kept.k, kept.v), (want_kept.k, want_kept.v))


def test_adapters_see_every_matrix() -> None:
    layer = CountingLayer()
    joined = MergedMatrices(layer.q, layer.k, layer.v)
    fused = FusedBlock(layer.block, joined, joined, FusedMlp(joined, joined), MAX_FUSED_TOKENS)
    run(fused, torch.randn(2, 6, HIDDEN), batch(6, [(LoraRef(1, 1.0),)] * 2))
    assert layer.call_counts() == [1] * 7
    assert joined.num_calls == 0


def test_attention_alone_is_fused_where_the_mlp_cannot_be() -> None:
    layer = CountingLayer()
    weight, attn = torch.rand(HIDDEN), layer.block.attn
    layer.block.attn_norm = REFERENCE.add_norm(NORM, weight, None)
    norm = REFERENCE.norm(NORM, weight, None)

    def qkv(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        assert residual is None
        return [norm(x) @ one.weight.T for one in (layer.q, layer.k, layer.v)]

    def o(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        assert residual is not None
        return [x @ layer.o.weight.T + residual]

    fused = FusedBlock(layer.block, qkv, o, None, MAX_FUSED_TOKENS)
    x = torch.randn(2, 2, HIDDEN)
    want, want_kept = run(layer.block, x, batch(2))
    got, kept = run(fused, x, batch(2))
    assert layer.call_counts() == [1, 1, 1, 1, 2, 2, 2]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((kept.k, kept.v), (want_kept.k, want_kept.v))
    assert fused.attn is attn


@pytest.mark.parametrize("shape", ["plain", "parallel", "fused"])
def test_fill_kv_computes_attention_inputs_only(shape: str) -> None:
    layer = CountingLayer(shape == "parallel")
    block = layer.block
    if shape == "fused":
        plain = lambda x, residual: [x]  # noqa: E731
        block = FusedBlock(block, plain, plain, FusedMlp(plain, plain), MAX_FUSED_TOKENS)
    x = torch.randn(2, 6, HIDDEN)
    _, want = run(block, x, batch(6))
    before, kept = layer.call_counts(), LastKV()
    block.fill_kv(x, x, batch(6), kept)
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


class Stackable:
    """A layer as one that adds one, alone and with others."""

    def __init__(self, stacks: bool = True) -> None:
        self.stacks = stacks

    def __call__(self, x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor:
        return x + 1

    def fuse_decoder(self, following: Sequence[b.FusedLayer]) -> b.FusedDecoder | None:
        count = 1 + len(following)
        return (lambda x, layers, metadata: x + count) if self.stacks else None


def fused_block(fused_layer: b.FusedLayer | None) -> FusedBlock:
    plain = lambda x, residual: [x]  # noqa: E731
    made = FusedBlock(CountingLayer(False).block, plain, plain, FusedMlp(plain, plain), MAX_FUSED_TOKENS)
    made.fused_layer = fused_layer
    return made


def test_blocks_are_stacked_if_all_are_fused() -> None:
    good = [fused_block(Stackable()) for _ in range(3)]
    stack = fuse_stack(good)
    assert stack is not None
    x = torch.randn(2, 2, HIDDEN)
    got = stack.forward(x, batch(2), [LastKV()] * 3)
    assert got is not None
    assert torch.equal(got, x + 3)
    others: list[list[BlockLike]] = [[], [*good, good[0].block], [*good, fused_block(None)]]
    others += [[fused_block(lambda x, kv, metadata: x), *good], [fused_block(Stackable(stacks=False)), *good]]
    assert [fuse_stack(blocks) for blocks in others] == [None] * 5


@pytest.mark.parametrize("other", [batch(6), replace(batch(2), outputs="none"), batch(2, [(), ()])])
def test_a_stack_declines_other_batches(other: Batch) -> None:
    stack = fuse_stack([fused_block(Stackable())] * 3)
    assert stack is not None
    assert stack.forward(torch.randn(2, 2, HIDDEN), other, [LastKV()] * 3) is None
