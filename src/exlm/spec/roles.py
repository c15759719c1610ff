"""Every matrix of a model by role: the one place that knows which there are and how wide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .layers import Attention, Mlp, Moe
from .model import Model


class Matrix(NamedTuple):
    """A matrix the files must hold: y = x @ W (+ bias)."""

    role: str
    in_features: int
    out_features: int
    bias: bool = False


def matrices(model: Model) -> Iterator[Matrix]:
    """All of them in the order they are used, the head last; the embedding table is not one."""
    for i, layer in enumerate(model.layers):
        yield from _attention(f"layers.{i}.attn.", model.hidden, layer.attn)
        if isinstance(layer.mlp, Moe):
            yield from _moe(f"layers.{i}.mlp.", model.hidden, layer.mlp)
        else:
            yield from _mlp(f"layers.{i}.mlp.", model.hidden, layer.mlp)
    yield Matrix("head", model.hidden, model.vocab, model.head.bias)


def _attention(at: str, hidden: int, attn: Attention) -> Iterator[Matrix]:
    wide, narrow = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    yield Matrix(at + "q", hidden, wide, attn.qkv_bias)
    yield Matrix(at + "k", hidden, narrow, attn.qkv_bias)
    yield Matrix(at + "v", hidden, narrow, attn.qkv_bias)
    yield Matrix(at + "o", wide, hidden, attn.out_bias)


def _mlp(at: str, hidden: int, mlp: Mlp) -> Iterator[Matrix]:
    if mlp.gated:
        yield Matrix(at + "gate", hidden, mlp.width, mlp.bias)
    yield Matrix(at + "up", hidden, mlp.width, mlp.bias)
    yield Matrix(at + "down", mlp.width, hidden, mlp.bias)


def _moe(at: str, hidden: int, moe: Moe) -> Iterator[Matrix]:
    yield Matrix(at + "router", hidden, moe.experts)
    for e in range(moe.experts):
        yield Matrix(f"{at}experts.{e}.gate", hidden, moe.width)
        yield Matrix(f"{at}experts.{e}.up", hidden, moe.width)
        yield Matrix(f"{at}experts.{e}.down", moe.width, hidden)
