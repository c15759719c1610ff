"""What a backend offers. It is asked once, while a model loads; it answers with a callable, or `Unsupported`.

A kernel gets tensors and returns tensors; it owns nothing but its weights. Shapes at this border: activations
are (rows, tokens, features), heads are (rows, tokens, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .. import spec
from ..formats import Weight

LinearFn = Callable[[Tensor], Tensor]
FusedLinear = Callable[[Tensor, Tensor | None], list[Tensor]]
"""(x, residual) → what one or several matrices make of x, plus the residual; None adds nothing."""

EmbeddingFn = Callable[[Tensor], Tensor]
"""(rows, tokens) ids → (rows, tokens, hidden) vectors, in the table's own precision."""

NormFn = Callable[[Tensor], Tensor]
AddNormFn = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(x, y) → x + y and its norm; None adds nothing. The sum is in x's precision."""

ActivationFn = Callable[[Tensor], Tensor]
GatedActivationFn = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) → act(gate) · up."""

RopeFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k, positions) → (q, k) turned; positions are (rows, tokens), or (3, rows, tokens) for three planes."""

QKNormFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k) → both normalised, (rows, tokens, heads, head_dim)."""

MoeFn = Callable[[Tensor, Tensor], Tensor]
"""(x, router logits) → the weighted sum of the chosen experts' answers."""


FUSE_MAX_TOKENS = 64
"""Rows up to which a layer's parts are fused."""

MAX_DEQUANT_BYTES = 1 << 28
"""Bytes that packed matrices in full may take side by side; larger ones gain nothing by company."""


class NormPrologue(NamedTuple):
    """The norm that stands before matrices: root mean square, no bias."""

    norm: spec.Norm
    weight: Tensor


class AttnMetadata(Protocol):
    """Where a step's tokens stand: what attention and the cache must know of a batch."""

    @property
    def past_lens(self) -> Tensor:
        """(rows,) tokens each row has in the cache already."""
        ...

    @property
    def pages(self) -> Tensor:
        """(rows, width) the page numbers of each row, in order."""
        ...

    @property
    def positions(self) -> Tensor:
        """(rows, tokens) by how much each new token turns, or (3, rows, tokens) for three planes."""
        ...

    @property
    def max_kv_len(self) -> int:
        """The largest past + new tokens of any row, known without asking the device."""
        ...

    @property
    def uniform(self) -> bool:
        """Every row has the same past, longest - new tokens, and no key is hidden."""
        ...

    @property
    def mask(self) -> Tensor | None:
        """(rows, longest) False where a key must never be seen; None hides nothing."""
        ...


KVCacheDtype = Literal["float", "hadamard8", "hadamard4", "fp8_e5m2"]
"""How numbers are stored: as they are, in rotated codes of 8 or 4 bits, or as the upper bytes of halves."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class KVPages:
    """Keys and values that a kernel may read and write in place: (pages, size, kv_heads, …), contiguous.

    As long as it is the same object, its tensors are the same memory: kernels may keep what they made of it.
    """

    page_size: int
    keys: tuple[Tensor, ...]  # the stored numbers, then their scales where there are any
    values: tuple[Tensor, ...]
    dtypes: tuple[KVCacheDtype, KVCacheDtype]  # of keys and of values


class LayerKVCache(Protocol):
    """One layer's keys and values."""

    @property
    def paged(self) -> KVPages | None:
        """The pages themselves; None if there are none."""
        ...

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Store the new tokens' heads; return all of them, (rows, longest, kv_heads, head_dim)."""
        ...


AttentionFn = Callable[[Tensor, Tensor, Tensor, LayerKVCache, AttnMetadata], Tensor]
"""(q, k, v, the layer's cache, where) → (rows, tokens, heads · head_dim)."""


def no_rope(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys that do not turn: the layer knows no positions."""
    return q, k


class Backend(Protocol):
    """A way to compute, on one device and in one precision."""

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
        """Normalise the last dimension; the answer is in the backend's precision."""
        ...

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> AddNormFn:
        """The same behind an addition, whose sum is kept."""
        ...

    def activation(self, act: spec.Activation) -> ActivationFn:
        """The MLP's nonlinearity."""
        ...

    def gated(self, act: spec.Activation) -> GatedActivationFn:
        """The nonlinearity of one half times the other."""
        ...

    def rope(self, rope: spec.Rope, length: int) -> RopeFn:
        """Turn heads by their positions, up to `length` of them."""
        ...

    def attention(self, attn: spec.Attention, rope: RopeFn) -> AttentionFn:
        """Turn queries and keys, store keys and values, then attend."""
        ...

    def moe(self, moe: spec.Moe, gate: list[LinearFn], up: list[LinearFn], down: list[LinearFn]) -> MoeFn:
        """Route each token to its experts."""
        ...


FusedLayer = Callable[[Tensor, LayerKVCache, AttnMetadata], Tensor | None]
"""(x, the layer's cache, where) → all a layer makes of x; None where this time it must go in parts."""


@runtime_checkable
class SupportsLayerFusion(Protocol):
    """A layer's first projection, if it can be put together with all that follows it in the layer."""

    def fuse_layer(
        self, attend: AttentionFn, norm: QKNormFn | None, o: FusedLinear, gate: FusedLinear, down: FusedLinear
    ) -> FusedLayer | None:
        """The layer as one; None if its parts do not fit together. `norm` comes before attention."""
        ...


FusedDecoder = Callable[[Tensor, Sequence[LayerKVCache], AttnMetadata], Tensor | None]
"""(x, each layer's cache, where) → all that layers one behind the other make of x; None as above."""


@runtime_checkable
class SupportsDecoderFusion(Protocol):
    """A whole layer that can be run at once with those behind it."""

    def fuse_decoder(self, following: Sequence[FusedLayer]) -> FusedDecoder | None:
        """All of them as one; None if they do not fit together."""
        ...


@runtime_checkable
class SupportsLayerChaining(Protocol):
    """A whole layer that can do some of the following one's work."""

    def chain_to(self, following: FusedLayer) -> None:
        """Know who takes its answers."""
        ...


@runtime_checkable
class SupportsDequantGemm(Protocol):
    """A projection that is quick for more than FEW rows too, but then does nothing besides the matrices."""

    def dequant_gemm(self, x: Tensor) -> list[Tensor]:
        """What each matrix makes of x; they may be parts of wider rows."""
        ...


@runtime_checkable
class SupportsFusion(Protocol):
    """A backend that can also do several things as one."""

    max_fused_tokens: int
    """Rows up to which that is quicker; beyond, each part is asked by itself."""

    def fused_linear(
        self,
        linears: Sequence[LinearFn],
        prologue: NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> FusedLinear:
        """Matrices that it bound before, together, for up to `most` rows, behind a norm if there is one.

        With `act` there are two, and the answer is act(first) · second. With `full` it is in float32.
        """
        ...


class TuneSpace(Protocol):
    """Work of one kind, and how it is dealt out: a setting is a few whole numbers."""

    @property
    def name(self) -> str:
        """What kind of work it is."""
        ...

    @property
    def config(self) -> tuple[int, ...]:
        """How it is dealt out now."""
        ...

    def neighbors(self) -> list[tuple[int, ...]]:
        """Settings that are one step away."""
        ...

    def apply(self, config: tuple[int, ...]) -> None:
        """Deal it out so from now on."""
        ...


@runtime_checkable
class SupportsTuning(Protocol):
    """A backend that can be told what is quickest on its device."""

    def tune_spaces(self, run: Callable[[], object]) -> Sequence[TuneSpace]:
        """The kinds of work that a run consists of."""
        ...

    def save_tuned(self, spaces: Sequence[TuneSpace]) -> Path | None:
        """Remember how they are set, for models that are loaded later; the file, if there is one."""
        ...
