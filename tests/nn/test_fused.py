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
from exlm.kernels import backend as b
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Active, Attention, Batch, Block, GatedMlp, Linear, ParallelBlock, Projection
from exlm.nn.attention import leave
from exlm.nn.block import BlockLike
from exlm.nn.fused import FusedBlock, Gated, stacked

PLAIN = ReferenceBackend(torch.device("cpu"), torch.float32)
HIDDEN, WIDTH = 32, 40
ATTN = spec.Attention(heads=4, kv_heads=2, head_dim=8, rope=None, scale=8**-0.5)
NORM = spec.Norm()
MOST = 4


class Counted(Linear):
    """A matrix that knows how often it was asked."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = torch.randn(outputs, inputs) / inputs**0.5
        super().__init__(PLAIN.linear(DenseWeight(self.weight)), inputs, outputs)
        self.asked = 0

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        self.asked += 1
        return super().forward(x, batch)


class Joined:
    """Several of them as one, for many rows only."""

    def __init__(self, *parts: Counted) -> None:
        self.sizes, self.whole = [part.out_features for part in parts], torch.cat([p.weight for p in parts])
        self.asked = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        raise AssertionError("these are many rows")

    def plainly(self, x: Tensor) -> list[Tensor]:
        self.asked += 1
        return list((x @ self.whole.T).split_with_sizes(self.sizes, -1))


class Kept:
    """A cache of what was stored last."""

    paged = None

    def update(self, k: Tensor, v: Tensor, where: b.Where) -> tuple[Tensor, Tensor]:
        self.k, self.v = k, v
        return k, v


def add_norm() -> b.AddNorm:
    return PLAIN.add_norm(NORM, torch.rand(HIDDEN), None)


class Layer:
    """A layer of either shape, and its matrices."""

    def __init__(self, parallel: bool = False) -> None:
        torch.manual_seed(7)
        self.q, self.k, self.v = (Counted(HIDDEN, heads * 8) for heads in (4, 2, 2))
        self.o, self.down = Counted(32, HIDDEN), Counted(WIDTH, HIDDEN)
        self.gate, self.up = Counted(HIDDEN, WIDTH), Counted(HIDDEN, WIDTH)
        attend = PLAIN.attention(ATTN, b.stand)
        attn = Attention(8, Projection(self.q, self.k, self.v), leave, attend, self.o)
        mlp = GatedMlp(PLAIN.gated("silu"), self.gate, self.up, self.down)
        same = lambda x: x  # noqa: E731
        self.block: Any = (
            ParallelBlock(attn, mlp, add_norm(), same)
            if parallel
            else Block(attn, mlp, add_norm(), add_norm(), same, same)
        )

    def asked(self) -> list[int]:
        return [one.asked for one in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)]


def batch(tokens: int, adapters: Sequence[tuple[Active, ...]] = ()) -> Batch:
    ids, none = torch.zeros(2, tokens, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    return Batch(ids, ids, none, ids[:, :1], tokens, even=True, adapters=tuple(adapters))


def run(block: BlockLike, x: Tensor, given: Batch) -> tuple[Tensor, Kept]:
    kept = Kept()
    total, more = block.forward(x, x, given, kept)
    return total if more is None else total + more, kept


def test_many_rows_are_joined() -> None:
    layer = Layer()
    qkv, gate = Joined(layer.q, layer.k, layer.v), Joined(layer.gate, layer.up)
    fused = FusedBlock(layer.block, qkv, qkv, Gated(gate, gate), MOST)
    x = torch.randn(2, 6, HIDDEN)
    want, want_kept = run(layer.block, x, batch(6))
    assert layer.asked() == [1] * 7
    got, kept = run(fused, x, batch(6))
    assert layer.asked() == [1, 1, 1, 2, 1, 1, 2]
    assert (qkv.asked, gate.asked) == (1, 1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((kept.k, kept.v), (want_kept.k, want_kept.v))


def test_adapters_see_every_matrix() -> None:
    layer = Layer()
    joined = Joined(layer.q, layer.k, layer.v)
    fused = FusedBlock(layer.block, joined, joined, Gated(joined, joined), MOST)
    run(fused, torch.randn(2, 6, HIDDEN), batch(6, [(Active(1, 1.0),)] * 2))
    assert layer.asked() == [1] * 7
    assert joined.asked == 0


def test_attention_alone_is_fused_where_the_mlp_cannot_be() -> None:
    layer = Layer()
    weight, attn = torch.rand(HIDDEN), layer.block.attn
    layer.block.attn_norm = PLAIN.add_norm(NORM, weight, None)
    norm = PLAIN.norm(NORM, weight, None)

    def qkv(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        assert residual is None
        return [norm(x) @ one.weight.T for one in (layer.q, layer.k, layer.v)]

    def o(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        assert residual is not None
        return [x @ layer.o.weight.T + residual]

    fused = FusedBlock(layer.block, qkv, o, None, MOST)
    x = torch.randn(2, 2, HIDDEN)
    want, want_kept = run(layer.block, x, batch(2))
    got, kept = run(fused, x, batch(2))
    assert layer.asked() == [1, 1, 1, 1, 2, 2, 2]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((kept.k, kept.v), (want_kept.k, want_kept.v))
    assert fused.attn is attn


@pytest.mark.parametrize("shape", ["plain", "parallel", "fused"])
def test_what_nobody_asks_for_is_not_computed(shape: str) -> None:
    layer = Layer(shape == "parallel")
    block = layer.block
    if shape == "fused":
        plain = lambda x, residual: [x]  # noqa: E731
        block = FusedBlock(block, plain, plain, Gated(plain, plain), MOST)
    x = torch.randn(2, 6, HIDDEN)
    _, want = run(block, x, batch(6))
    before, kept = layer.asked(), Kept()
    block.remember(x, x, batch(6), kept)
    assert torch.equal(kept.k, want.k)
    assert torch.equal(kept.v, want.v)
    assert [now - then for now, then in zip(layer.asked(), before, strict=True)] == [1, 1, 1, 0, 0, 0, 0]


class Stackable:
    """A layer as one that adds one, alone and with others."""

    def __init__(self, stacks: bool = True) -> None:
        self.stacks = stacks

    def __call__(self, x: Tensor, kv: b.KeyValues, where: b.Where) -> Tensor:
        return x + 1

    def stack(self, following: Sequence[b.Whole]) -> b.Stack | None:
        count = 1 + len(following)
        return (lambda x, layers, where: x + count) if self.stacks else None


def fused_block(whole: b.Whole | None) -> FusedBlock:
    plain = lambda x, residual: [x]  # noqa: E731
    made = FusedBlock(Layer(False).block, plain, plain, Gated(plain, plain), MOST)
    made.whole = whole
    return made


def test_blocks_are_stacked_if_every_one_is_whole() -> None:
    good = [fused_block(Stackable()) for _ in range(3)]
    stack = stacked(good)
    assert stack is not None
    x = torch.randn(2, 2, HIDDEN)
    got = stack.forward(x, batch(2), [Kept()] * 3)
    assert got is not None
    assert torch.equal(got, x + 3)
    others: list[list[BlockLike]] = [[], [*good, good[0].block], [*good, fused_block(None)]]
    others += [[fused_block(lambda x, kv, where: x), *good], [fused_block(Stackable(stacks=False)), *good]]
    assert [stacked(blocks) for blocks in others] == [None] * 5


@pytest.mark.parametrize("other", [batch(6), replace(batch(2), outputs="none"), batch(2, [(), ()])])
def test_a_stack_leaves_what_blocks_do_otherwise(other: Batch) -> None:
    stack = stacked([fused_block(Stackable())] * 3)
    assert stack is not None
    assert stack.forward(torch.randn(2, 2, HIDDEN), other, [Kept()] * 3) is None
