"""The interface of a backend, asked while a model loads: it returns a callable or raises `Unsupported`.

A kernel takes tensors and returns tensors; it owns nothing but its weights. Shapes: activations are
(rows, tokens, features), heads are (rows, tokens, heads, head_dim).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .. import spec
from ..formats import Weight
from .packed_store import PackedStore

LinearFn = Callable[[Tensor], Tensor]
"""x → x @ W + bias."""

EmbeddingFn = Callable[[Tensor], Tensor]
"""(rows, tokens) ids → (rows, tokens, hidden) vectors, in the table's precision."""

NormFn = Callable[[Tensor], Tensor]
AddNormFn = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(x, y) → x + y and its norm; None adds nothing. The sum is in x's precision."""

ActivationFn = Callable[[Tensor], Tensor]
GatedActivationFn = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) → act(gate) · up."""

RopeFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k, positions) → (q, k) after RoPE; positions are (rows, tokens), or (3, rows, tokens) for M-RoPE."""

QKNormFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k) → both normalised, (rows, tokens, heads, head_dim)."""

MoeFn = Callable[[Tensor, Tensor], Tensor]
"""(x, router logits) → the sum of the selected experts' outputs, weighted by their routing weights."""


FUSE_MAX_TOKENS = 64
"""Tokens of a batch up to which the parts of a layer are fused into a few launches."""

MAX_DEQUANT_BYTES = 1 << 28
"""Bytes up to which packed matrices are dequantised side by side for one GEMM; larger ones gain nothing."""


ActivationBits = Literal[16, 8]
"""Bits to which a backend may round the activations of a product with quantised weights."""


class NormPrologue(NamedTuple):
    """A norm that the matrices after it apply to their input."""

    norm: spec.Norm
    weight: Tensor


class StateSlots(NamedTuple):
    """The slots in which a pass finds and leaves recurrent states. A pass never writes to a slot that it reads."""

    source: Tensor  # (rows,) int64: each row's state before its first token; -1: a state of zeros
    targets: Tensor  # (rows, tokens) int64: where the state after each token is stored; -1: it is not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnMetadata:
    """The part of a batch that attention, recurrent mixers and the cache read."""

    positions: Tensor  # (rows, tokens) the RoPE position of each new token, or (3, rows, tokens) for M-RoPE
    past_lens: Tensor  # (rows,) the tokens of each row that are already in the cache
    page_table: Tensor  # (rows, width) the page numbers of each row, in order
    max_kv_len: int  # the largest past + new tokens of any row, known without waiting for the device
    uniform: bool  # every row's past is max_kv_len - new tokens, and no key is masked
    mask: Tensor | None = None  # (rows, max_kv_len) False where a key must not be attended to
    state_slots: StateSlots | None = None  # None: every row starts from zeros, and no state is stored


KVCacheDtype = Literal["float", "hadamard8", "hadamard4", "fp8_e5m2"]
"""How the cache stores numbers: as they are; Hadamard-rotated, as integers of 8 or 4 bits with a scale for
each 32; or as the upper bytes of float16."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class KVPages:
    """Keys and values that a kernel may read and write in place: (pages, page_size, kv_heads, …), contiguous.

    While it is the same object, its tensors are the same memory: kernels may keep addresses.
    """

    page_size: int  # tokens
    keys: tuple[Tensor, ...]  # the stored numbers, then their scales where there are any
    values: tuple[Tensor, ...]
    dtypes: tuple[KVCacheDtype, KVCacheDtype]  # of keys and of values


class RecurrentState(NamedTuple):
    """One layer's recurrent states of many sequences, one in each slot, contiguous."""

    conv: Tensor  # (slots, kernel - 1, channels) the last inputs of the convolution, oldest first
    matrix: Tensor | None  # (slots, heads, rows, columns) float32; None for a short convolution


class LayerKVCache(Protocol):
    """The keys and values of one layer, and its recurrent states."""

    @property
    def state(self) -> RecurrentState | None:
        """The recurrent states; None if the layer keeps none."""
        ...

    @property
    def kv_pages(self) -> KVPages | None:
        """The pages, for kernels that read them in place; None if the layer has no such pages."""
        ...

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Store the new tokens' heads; return all keys and values, (rows, max_kv_len, kv_heads, head_dim)."""
        ...


AttentionFn = Callable[[Tensor, Tensor, Tensor, LayerKVCache, AttnMetadata], Tensor]
"""(q, k, v, the layer's cache, metadata) → (rows, tokens, heads · head_dim)."""


class DeltaNetParams(NamedTuple):
    """The tensors of a `spec.DeltaNet` that are no matrices, float32."""

    conv: Tensor  # (channels, kernel), channels of q, k, v in this order; the last column is the newest input's
    a_log: Tensor  # (value_heads,) the logarithm of A
    dt_bias: Tensor  # (decay_width,)
    norm: Tensor  # (value_dim,) the scale of the norm of each head's output


class Mamba2Params(NamedTuple):
    """The tensors of a `spec.Mamba2` that are no matrices, float32."""

    conv: Tensor  # (channels, kernel), channels of x, B, C in this order
    conv_bias: Tensor | None  # (channels,)
    a_log: Tensor  # (heads,)
    dt_bias: Tensor  # (heads,)
    d: Tensor  # (heads,)
    norm: Tensor | None  # (width,)


DeltaNetFn = Callable[[Tensor, Tensor, Tensor, Tensor, RecurrentState | None, AttnMetadata], Tensor]
"""(q, k and v side by side, z, a, b, the layer's states, metadata) → (rows, tokens, value width): convolution,
delta rule, norm and gate, everything between the projections."""

Mamba2Fn = Callable[[Tensor, RecurrentState | None, AttnMetadata], Tensor]
"""(the projection to z, x, B, C, dt, the layer's states, metadata) → (rows, tokens, width)."""

ShortConvFn = Callable[[Tensor, RecurrentState | None, AttnMetadata], Tensor]
"""(the projection to B, C, x, the layer's states, metadata) → (rows, tokens, width)."""


def no_rope(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of a layer without positions, unchanged."""
    return q, k


class Backend(Protocol):
    """Kernels for one device and one precision."""

    name: str
    device: torch.device
    dtype: torch.dtype

    def linear(self, weight: Weight) -> LinearFn:
        """x @ W + bias."""
        ...

    def embedding(self, weight: Weight) -> EmbeddingFn:
        """Columns of W, one for each id."""
        ...

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> NormFn:
        """Normalise the last dimension; the result is in the backend's precision."""
        ...

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> AddNormFn:
        """The norm of a sum, and the sum."""
        ...

    def activation(self, act: spec.Activation) -> ActivationFn:
        """The MLP's activation function."""
        ...

    def gated(self, act: spec.Activation) -> GatedActivationFn:
        """act(gate) · up."""
        ...

    def rope(self, rope: spec.Rope, length: int) -> RopeFn:
        """RoPE for positions below `length`."""
        ...

    def attention(self, attn: spec.Attention, rope: RopeFn) -> AttentionFn:
        """Apply RoPE to queries and keys, store keys and values, attend."""
        ...

    def moe(
        self,
        moe: spec.Moe,
        gate: list[LinearFn],
        up: list[LinearFn],
        down: list[LinearFn],
        selection_bias: Tensor | None = None,
    ) -> MoeFn:
        """Route each token to its experts; `gate`, `up` and `down` hold one matrix for each expert.

        `gate` is empty for experts without gates; `selection_bias` is (experts,). The shared expert is not part of it.
        """
        ...

    # The recurrences sum in one order, token after token: a state depends on the tokens before it alone, and not on
    # the passes that computed them.

    def delta_net(self, mixer: spec.DeltaNet, params: DeltaNetParams) -> DeltaNetFn:
        """Convolution, delta rule, norm and gate."""
        ...

    def mamba2(self, mixer: spec.Mamba2, params: Mamba2Params) -> Mamba2Fn:
        """Convolution, state-space recurrence, gate and norm."""
        ...

    def short_conv(self, mixer: spec.ShortConv, conv: Tensor, bias: Tensor | None) -> ShortConvFn:
        """B · x, its causal convolution by (width, kernel) weights, times C."""
        ...


# -- fusion: an optional part of a backend -----------------------------------------------------------


class FusedLinear(ABC):
    """Matrices that share an input, as one: with a norm before them, and a residual or an activation after.

    Backends subclass it; what they cannot fuse keeps the defaults here.
    """

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """The output of each matrix; the residual is added to the first."""

    @abstractmethod
    def unfused(self, x: Tensor) -> list[Tensor]:
        """The product of x with each matrix, without norm, activation and residual: faster for many tokens.

        Results may be views of one wider tensor.
        """

    def fuse_layer(
        self, attend: AttentionFn, norm: QKNormFn | None, o: FusedLinear, gate_up: FusedLinear, down: FusedLinear
    ) -> FusedLayer | None:
        """The layer that begins with this q, k and v projection, as one; None if its parts do not fit.

        `norm` is the QK norm.
        """
        return None

    def fuse_layer_around(
        self, mix: MixFn, o: FusedLinear, gate_up: FusedLinear, down: FusedLinear
    ) -> FusedLayer | None:
        """The layer that begins with these projections of any mixer, as one; None if its parts do not fit."""
        return None


MixFn = Callable[[list[Tensor], Tensor, LayerKVCache, AttnMetadata], tuple[Tensor, Tensor | None]]
"""A mixer without its projections: (the outputs of its input projections, the residual stream, the layer's cache,
metadata) → the (rows, tokens, …) input of its output projection, and the logits of a gate or None. The caller
multiplies that input by sigmoid(gate)."""


class FusedLayer(ABC):
    """A whole decoder layer as one."""

    @abstractmethod
    def __call__(self, x: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor | None:
        """The residual stream after the layer; None for a batch that must run part by part."""

    def chain_to(self, following: FusedLayer) -> None:
        """Write the output also in the form that the following layer's kernels read, if that is possible."""
        return

    def fuse_decoder(self, following: Sequence[FusedLayer]) -> FusedDecoder | None:
        """This layer and those after it as one; None if they do not fit together."""
        return None


FusedDecoder = Callable[[Tensor, Sequence[LayerKVCache], AttnMetadata], Tensor | None]
"""(x, each layer's cache, metadata) → x after all layers; None for a batch that must run layer by layer."""


@runtime_checkable
class SupportsFusion(Protocol):
    """A backend that can fuse matrices with each other and with what stands before and after them."""

    max_fused_tokens: int
    """Tokens up to which a fused linear is faster than `unfused` and the parts around it."""

    def fused_linear(
        self,
        linears: Sequence[LinearFn],
        prologue: NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> FusedLinear:
        """Matrices that this backend has bound, as one; `Unsupported` if it cannot.

        With `act` there are two, and the output is act(first) · second. With `fp32_out` it is in float32.
        """
        ...


class PackedCopy(Protocol):
    """The matrices of a model that loads, as a backend packed them at an earlier start; several threads may use it."""

    def restore(self, role: str) -> tuple[LinearFn | EmbeddingFn, str] | None:
        """What was bound for a role, and the description of its weight; None if it is to be read and bound."""
        ...

    def keep(self, role: str, kernel: object, detail: str) -> None:
        """Take what was bound for a role, for later starts."""
        ...

    def finish(self) -> object:
        """The model is loaded: write what is new, without waiting for it."""
        ...


@runtime_checkable
class SupportsPackedCopies(Protocol):
    """A backend that keeps packed matrices on disk."""

    def packed_copy(self, store: PackedStore, fingerprint: str, model: str) -> PackedCopy:
        """The packed matrices of the model that a fingerprint identifies; `model` is a name for people."""
        ...


class TuneSpace(Protocol):
    """GEMMs of one shape, and the tile configuration that they run with, as a tuple of integers."""

    @property
    def name(self) -> str:
        """The shape."""
        ...

    @property
    def config(self) -> tuple[int, ...]:
        """The configuration in use."""
        ...

    def neighbors(self) -> list[tuple[int, ...]]:
        """Configurations that differ from it in one step of one number."""
        ...

    def apply(self, config: tuple[int, ...]) -> None:
        """Use this one from now on."""
        ...


@runtime_checkable
class SupportsTuning(Protocol):
    """A backend whose tile configurations can be tuned on its device."""

    def tune_spaces(self, run: Callable[[], object]) -> Sequence[TuneSpace]:
        """Those of all GEMMs that `run` launches."""
        ...

    def save_tuned(self, spaces: Sequence[TuneSpace]) -> Path | None:
        """Store their configurations for models that are loaded later; returns the file, if there is one."""
        ...
