"""`Model`: a whole model as frozen data, from embedding to head; what differs between families is a field here.

Each part of a layer lists the matrices that the files must hold for it. A new kind of mixer or MLP is one more
dataclass here, with its matrices, and a module in `nn` that computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .rope import Rope
from .tensor_names import TensorNames

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]


class Matrix(NamedTuple):
    """A matrix that the files must hold: y = x @ W (+ bias)."""

    role: str
    in_features: int
    out_features: int
    bias: bool = False


@dataclass(frozen=True)
class Norm:
    """Root-mean-square or layer normalisation."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weight at load (1 for Gemma, whose weights are stored less one)
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

    def matrices(self, prefix: str, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use."""
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Matrix(prefix + "q", hidden, q_width, self.qkv_bias)
        yield Matrix(prefix + "k", hidden, kv_width, self.qkv_bias)
        yield Matrix(prefix + "v", hidden, kv_width, self.qkv_bias)
        yield Matrix(prefix + "o", q_width, hidden, self.out_bias)


@dataclass(frozen=True)
class Mlp:
    """act(gate) · up, then down; without a gate: act(up), then down."""

    width: int
    act: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def matrices(self, prefix: str, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use."""
        if self.gated:
            yield Matrix(prefix + "gate", hidden, self.width, self.bias)
        yield Matrix(prefix + "up", hidden, self.width, self.bias)
        yield Matrix(prefix + "down", self.width, hidden, self.bias)


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: a router and `experts` gated MLPs, of which `active` run for each token."""

    width: int
    experts: int
    active: int
    act: Activation = "silu"
    renormalize: bool = True  # the weights of the active experts sum to one

    def matrices(self, prefix: str, hidden: int) -> Iterator[Matrix]:
        """The router, then each expert's matrices in the order of use."""
        yield Matrix(prefix + "router", hidden, self.experts)
        for e in range(self.experts):
            yield from Mlp(self.width).matrices(f"{prefix}experts.{e}.", hidden)


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


@dataclass(frozen=True)
class Embed:
    """Token ids → hidden states."""

    scale: float = 1.0
    learned_positions: int = 0  # rows of a learned position table; 0: none


@dataclass(frozen=True)
class Head:
    """Hidden states → logits."""

    tied: bool = False  # falls back to the embedding when the files hold no head of its own
    scale: float = 1.0
    softcap: float | None = None
    normalize_rows: bool = False  # a float head's rows are normalised to length one at load
    bias: bool = False


@dataclass(frozen=True)
class Model:
    """The description of a model that a family function makes."""

    architecture: str
    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    max_positions: int  # trained context length
    embed: Embed = Embed()
    head: Head = Head()
    names: TensorNames = field(default_factory=TensorNames)
    fp32_residual: bool = False  # keep the residual stream in float32 under 16-bit compute
    requires_bos: bool = False  # a prompt without BOS gives nonsense


def matrices(model: Model) -> Iterator[Matrix]:
    """Every matrix of a model by role, in the order of use, the head last.

    The embedding table is not among them: it is looked up, not multiplied.
    """
    for i, layer in enumerate(model.layers):
        yield from layer.attn.matrices(f"layers.{i}.attn.", model.hidden)
        yield from layer.mlp.matrices(f"layers.{i}.mlp.", model.hidden)
    yield Matrix("head", model.hidden, model.vocab, model.head.bias)
