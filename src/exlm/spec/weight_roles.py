"""`matrices`: every matrix of a model by role, with its size and whether it has a bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .layers import Attention, Mlp, Moe
from .model import Model


class Matrix(NamedTuple):
    """A matrix that the files must hold: y = x @ W (+ bias)."""

    role: str
    in_features: int
    out_features: int
    bias: bool = False


def matrices(model: Model) -> Iterator[Matrix]:
    """In the order of use, the head last; without the embedding table, which is looked up, not multiplied."""
    for i, layer in enumerate(model.layers):
        yield from _attention(f"layers.{i}.attn.", model.hidden, layer.attn)
        if isinstance(layer.mlp, Moe):
            yield from _moe(f"layers.{i}.mlp.", model.hidden, layer.mlp)
        else:
            yield from _mlp(f"layers.{i}.mlp.", model.hidden, layer.mlp)
    yield Matrix("head", model.hidden, model.vocab, model.head.bias)


def _attention(prefix: str, hidden: int, attn: Attention) -> Iterator[Matrix]:
    q_width, kv_width = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    yield Matrix(prefix + "q", hidden, q_width, attn.qkv_bias)
    yield Matrix(prefix + "k", hidden, kv_width, attn.qkv_bias)
    yield Matrix(prefix + "v", hidden, kv_width, attn.qkv_bias)
    yield Matrix(prefix + "o", q_width, hidden, attn.out_bias)


def _mlp(prefix: str, hidden: int, mlp: Mlp) -> Iterator[Matrix]:
    if mlp.gated:
        yield Matrix(prefix + "gate", hidden, mlp.width, mlp.bias)
    yield Matrix(prefix + "up", hidden, mlp.width, mlp.bias)
    yield Matrix(prefix + "down", mlp.width, hidden, mlp.bias)


def _moe(prefix: str, hidden: int, moe: Moe) -> Iterator[Matrix]:
    yield Matrix(prefix + "router", hidden, moe.experts)
    for e in range(moe.experts):
        yield Matrix(f"{prefix}experts.{e}.gate", hidden, moe.width)
        yield Matrix(f"{prefix}experts.{e}.up", hidden, moe.width)
        yield Matrix(f"{prefix}experts.{e}.down", moe.width, hidden)
