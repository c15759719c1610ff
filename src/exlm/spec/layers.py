"""One decoder layer and its parts, as frozen data: what differs between families is a field here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]


@dataclass(frozen=True)
class Norm:
    """Root-mean-square or layer normalisation."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weight at load (Gemma stores w - 1)
    bias: bool = False


@dataclass(frozen=True)
class QkNorm:
    """Normalisation of queries and keys, before RoPE."""

    norm: Norm
    scope: Literal["head", "all"] = "head"  # each head alone, or all heads of a token together


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None  # None: no positional encoding (NoPE)
    scale: float  # on q·k
    window: int | None = None  # sliding window: keys a query attends to, its own included; None: all
    softcap: float | None = None
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qkv_clip: float | None = None  # q, k and v are clamped to ±qkv_clip


@dataclass(frozen=True)
class Mlp:
    """act(gate) · up, then down; without a gate: act(up), then down."""

    width: int
    act: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: a router and `experts` gated MLPs, of which `active` run for each token."""

    width: int
    experts: int
    active: int
    act: Activation = "silu"
    renormalize: bool = True  # the weights of the active experts sum to one


@dataclass(frozen=True)
class Layer:
    """norm → attention → post-norm → add, norm → MLP → post-norm → add; None leaves a norm out."""

    attn: Attention
    mlp: Mlp | Moe
    attn_norm: Norm | None
    mlp_norm: Norm | None
    attn_post: Norm | None = None
    mlp_post: Norm | None = None
    parallel: bool = False  # attention and MLP read the same normalised input (attn_norm)
    residual_scale: float = 1.0  # on what attention and MLP add
