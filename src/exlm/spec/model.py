"""`Model`: a whole model as frozen data, from embedding to head; what differs between families is a field here.

Each part of a layer lists the matrices that the files must hold for it. A new kind of mixer or MLP is one more
dataclass here, with its matrices, and a module in `nn` that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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


class StateShape(NamedTuple):
    """Shapes of what a recurrent mixer keeps of a sequence, whatever its length: a recurrent state."""

    conv: tuple[int, int]  # (kernel - 1, channels): the last inputs of the causal convolution
    matrix: tuple[int, int, int] | None = None  # (heads, rows, columns) in float32; None: only the convolution

    def nbytes(self, conv_item_bytes: int) -> int:
        """Bytes of one sequence's state with convolution inputs of this size."""
        return math.prod(self.conv) * conv_item_bytes + (0 if self.matrix is None else 4 * math.prod(self.matrix))


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
    gated: bool = False  # the heads' outputs are multiplied by sigmoid(gate), a projection as wide as q

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Matrix("attn.q", hidden, q_width, self.qkv_bias)
        yield Matrix("attn.k", hidden, kv_width, self.qkv_bias)
        yield Matrix("attn.v", hidden, kv_width, self.qkv_bias)
        if self.gated:
            yield Matrix("attn.gate", hidden, q_width, self.qkv_bias)
        yield Matrix("attn.o", q_width, hidden, self.out_bias)


@dataclass(frozen=True)
class LatentAttention:
    """MLA without positions on the latent: keys and values are expanded from a latent of `kv_rank` numbers.

    A head's key is `nope_dim` numbers of its own and `rope_dim` that all heads share. The cache holds the
    expanded heads, `nope_dim + rope_dim` wide, with values padded to that width.
    """

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None  # None: q in one projection
    rope: Rope | None  # None: no positional encoding (NoPE)
    scale: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded(self) -> Attention:
        """The attention over the expanded heads."""
        return Attention(self.heads, self.heads, self.head_dim, self.rope, self.scale)

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        if self.q_rank is None:
            yield Matrix("attn.q", hidden, self.heads * self.head_dim)
        else:
            yield Matrix("attn.q_down", hidden, self.q_rank)
            yield Matrix("attn.q_up", self.q_rank, self.heads * self.head_dim)
        yield Matrix("attn.kv_down", hidden, self.kv_rank + self.rope_dim)
        yield Matrix("attn.k_up", self.kv_rank, self.heads * self.nope_dim)
        yield Matrix("attn.v_up", self.kv_rank, self.heads * self.value_dim)
        yield Matrix("attn.o", self.heads * self.value_dim, hidden)


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (Qwen3-Next, Qwen3.5, OLMo-Hybrid), or Kimi delta attention with `decay="channel"`.

    A causal convolution with SiLU over q, k and v; then, per value head, with S (key_dim, value_dim), q and k
    of length one, decay exp(g) and write strength beta:

        S ← exp(g) · S;  S ← S + k ⊗ beta · (v - Sᵀk);  o = Sᵀq · key_dim^-½

    g = -exp(A) · softplus(a + dt_bias), one number for a head, or one for each key channel. The output is
    normalised per head and multiplied by act(z).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    decay: Literal["head", "channel"] = "head"
    gate_act: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0  # 2.0 allows negative eigenvalues
    gate_rank: int | None = None  # a and z are low-rank projections of this rank (Kimi); None: full matrices

    @property
    def key_width(self) -> int:
        """Width of q and of k."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of v, z and the output."""
        return self.value_heads * self.value_dim

    @property
    def decay_width(self) -> int:
        """Width of a: one number for each decay."""
        return self.value_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def state(self) -> StateShape:
        """What it keeps of a sequence."""
        channels = 2 * self.key_width + self.value_width
        return StateShape((self.conv_kernel - 1, channels), (self.value_heads, self.key_dim, self.value_dim))

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        yield Matrix("delta.q", hidden, self.key_width)
        yield Matrix("delta.k", hidden, self.key_width)
        yield Matrix("delta.v", hidden, self.value_width)
        if self.gate_rank is None:
            yield Matrix("delta.z", hidden, self.value_width)
            yield Matrix("delta.a", hidden, self.decay_width)
        else:
            yield Matrix("delta.z_down", hidden, self.gate_rank)
            yield Matrix("delta.z_up", self.gate_rank, self.value_width)
            yield Matrix("delta.a_down", hidden, self.gate_rank)
            yield Matrix("delta.a_up", self.gate_rank, self.decay_width)
        yield Matrix("delta.b", hidden, self.value_heads)
        yield Matrix("delta.o", self.value_width, hidden)


@dataclass(frozen=True)
class Mamba2:
    """Mamba 2: one projection to z, x, B, C and dt; a causal convolution with SiLU over x, B and C; then, per head,
    with S (head_dim, state_dim) and dt = clamp(softplus(dt + dt_bias)):

        S ← exp(-exp(A) · dt) · S + dt · x ⊗ B;  y = S C + D · x

    Heads of a group share B and C. The output is gated by SiLU(z) and normalised by group (`norm`), in the
    order that `norm_before_gate` says.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int
    norm: Norm | None  # over width / norm_groups numbers; None: only gated
    norm_groups: int = 1
    norm_before_gate: bool = False
    conv_bias: bool = True
    bias: bool = False  # of the projection in
    out_bias: bool = False  # of the projection out
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    in_scale: float = 1.0  # on the input of the projection
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # on z, x, B, C, dt

    @property
    def width(self) -> int:
        """Width of x, z and the output."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Width of x, B and C together."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        """What it keeps of a sequence."""
        return StateShape((self.conv_kernel - 1, self.conv_channels), (self.heads, self.head_dim, self.state_dim))

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        yield Matrix("mamba.in", hidden, self.width + self.conv_channels + self.heads, self.bias)
        yield Matrix("mamba.out", self.width, hidden, self.out_bias)


@dataclass(frozen=True)
class ShortConv:
    """LFM2's gated short convolution: one projection to B, C and x; y = C · conv(B · x)."""

    width: int
    conv_kernel: int
    bias: bool = False  # of both projections and of the convolution

    @property
    def state(self) -> StateShape:
        """What it keeps of a sequence."""
        return StateShape((self.conv_kernel - 1, self.width))

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        yield Matrix("conv.in", hidden, 3 * self.width, self.bias)
        yield Matrix("conv.out", self.width, hidden, self.bias)


@dataclass(frozen=True)
class ParallelMixers:
    """Attention and a recurrent mixer on the same normalised input (Falcon-H1); their outputs are added."""

    attention: Attention
    recurrent: Mamba2
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    recurrent_out_scale: float = 1.0

    @property
    def state(self) -> StateShape:
        """What the recurrent half keeps of a sequence."""
        return self.recurrent.state

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """The matrices of both halves."""
        yield from self.attention.matrices(hidden)
        yield from self.recurrent.matrices(hidden)


Mixer = Attention | LatentAttention | DeltaNet | Mamba2 | ShortConv | ParallelMixers


@dataclass(frozen=True)
class Mlp:
    """act(gate) · up, then down; without a gate: act(up), then down."""

    width: int
    act: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0  # on gate, before the activation (Falcon-H1)
    out_scale: float = 1.0  # on the output

    @property
    def scaled(self) -> bool:
        """Whether a scale is not one."""
        return (self.gate_scale, self.out_scale) != (1.0, 1.0)

    def matrices(self, hidden: int, prefix: str = "mlp.") -> Iterator[Matrix]:
        """Its matrices in the order of use, roles relative to the layer."""
        if self.gated:
            yield Matrix(prefix + "gate", hidden, self.width, self.bias)
        yield Matrix(prefix + "up", hidden, self.width, self.bias)
        yield Matrix(prefix + "down", self.width, hidden, self.bias)


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: a router and `experts` MLPs, of which `active` run for each token, and a shared one."""

    width: int
    experts: int
    active: int
    act: Activation = "silu"
    renormalize: bool = True  # the weights of the active experts sum to one
    gated: bool = True  # each expert is a gated MLP
    routing: Literal["softmax", "sigmoid"] = "softmax"  # what the router's logits pass to become scores
    selection_bias: bool = False  # a stored bias on the scores that select experts, but not on their weights
    routing_groups: int = 1  # experts are in groups of equal size, and only those of `active_groups` are selected
    active_groups: int = 1
    weight_scale: float = 1.0  # on the weights of the active experts, after they are renormalised
    shared: Mlp | None = None  # runs for every token beside the experts
    shared_gated: bool = False  # the shared expert's output is multiplied by sigmoid of a gate, one number a token
    latent: int | None = None  # the experts read and write a latent of this width (Nemotron 3); None: hidden states
    latent_bias: bool = False  # of the projections to the latent and back

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """The router, then each expert's matrices in the order of use; roles relative to the layer."""
        yield Matrix("mlp.router", hidden, self.experts)
        if self.latent is not None:
            yield Matrix("mlp.latent_down", hidden, self.latent, self.latent_bias)
        for e in range(self.experts):
            yield from Mlp(self.width, gated=self.gated).matrices(self.latent or hidden, f"mlp.experts.{e}.")
        if self.latent is not None:
            yield Matrix("mlp.latent_up", self.latent, hidden, self.latent_bias)
        if self.shared is not None:
            yield from self.shared.matrices(hidden, "mlp.shared.")
        if self.shared_gated:
            yield Matrix("mlp.shared_gate", hidden, 1)


@dataclass(frozen=True)
class Layer:
    """norm → mixer → post-norm → add, norm → MLP → post-norm → add; None leaves a part or a norm out.

    The mixer moves information between tokens: attention, or a recurrence. Norms before and after it are
    called attn_norm and attn_post whatever its kind.
    """

    mixer: Mixer | None
    mlp: Mlp | Moe | None
    attn_norm: Norm | None
    mlp_norm: Norm | None
    attn_post: Norm | None = None
    mlp_post: Norm | None = None
    parallel: bool = False  # attention and MLP read the same normalised input (attn_norm)
    residual_scale: float = 1.0  # on what mixer and MLP add

    @property
    def attention(self) -> Attention | None:
        """The layer's attention as the cache and its kernels see it; None if it has none."""
        match self.mixer:
            case Attention():
                return self.mixer
            case LatentAttention():
                return self.mixer.expanded
            case ParallelMixers():
                return self.mixer.attention
        return None

    @property
    def state(self) -> StateShape | None:
        """What its mixer keeps of a sequence; None without a recurrent mixer."""
        return None if self.mixer is None or isinstance(self.mixer, Attention | LatentAttention) else self.mixer.state

    def with_attention(self, change: Callable[[Attention], Attention]) -> Layer:
        """The layer with its attention changed; itself if it has none, or latent attention."""
        match self.mixer:
            case Attention():
                return replace(self, mixer=change(self.mixer))
            case ParallelMixers():
                return replace(self, mixer=replace(self.mixer, attention=change(self.mixer.attention)))
        return self

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """The matrices of mixer and MLP, roles relative to the layer."""
        if self.mixer is not None:
            yield from self.mixer.matrices(hidden)
        if self.mlp is not None:
            yield from self.mlp.matrices(hidden)


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
    draft_layers: int = 0  # layers for multi-token prediction that the files hold after these; they are not loaded

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer that has one."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def primary_rope(self) -> Rope | None:
        """The RoPE of the first layer with full attention, else of the first layer that has one.

        Context extension changes only this one: a windowed layer (Gemma 3) attends no further than its window.
        """
        with_rope = [attn for attn in self.attentions if attn.rope is not None]
        full_attention = [attn for attn in with_rope if attn.window is None]
        return next((attn.rope for attn in full_attention or with_rope), None)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(layer.state is not None for layer in self.layers)


def matrices(model: Model) -> Iterator[Matrix]:
    """Every matrix of a model by role, in the order of use, the head last.

    The embedding table is not among them: it is looked up, not multiplied.
    """
    for i, layer in enumerate(model.layers):
        yield from (matrix._replace(role=f"layers.{i}.{matrix.role}") for matrix in layer.matrices(model.hidden))
    yield Matrix("head", model.hidden, model.vocab, model.head.bias)
