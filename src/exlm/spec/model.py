"""`Model`: a whole model as data, from embedding to head, with the names of its tensors in files."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layers import Layer, Norm
from .tensor_names import TensorNames


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
