"""`Rope`: rotary position embeddings, their base, width and context extension.

A backend makes tables of sines and cosines from these numbers. Every kind of scaling depends on the length configured
when the model loads and never on the current sequence, so that a token's rotation does not depend on chunk size or
batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True)
class LinearScaling:
    """Linear position interpolation: positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicNtkScaling:
    """Dynamic NTK: a larger base if the configured length exceeds `original_max_positions`."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3: low frequencies divided by `factor`, high ones kept, interpolated between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: high frequencies kept, low ones divided by `factor`, and a linear ramp between.

    A frequency is on the ramp if it makes between `beta_slow` and `beta_fast` full rotations within
    `original_max_positions`.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # sin and cos are multiplied by it
    truncate: bool = True  # round the ramp's ends to whole indices of frequencies

    @staticmethod
    def mscale(factor: float, weight: float = 1.0) -> float:
        """The factor of sin and cos that keeps attention scores as sharp as without scaling."""
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    @classmethod
    def with_defaults(cls, factor: float, original_max_positions: int) -> Self:
        """YaRN with its usual betas and attention factor."""
        return cls(factor, original_max_positions, attention_factor=cls.mscale(factor))


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: each frequency divided by its own factor.

    `long_factors` apply if the configured length exceeds `original_max_positions`, else `short_factors`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float = 1.0


RopeScaling = LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one attention layer."""

    theta: float
    dim: int  # leading dimensions of a head that are rotated
    style: Literal["neox", "gptj"] = "neox"  # pairs (i, i + dim/2), or (2i, 2i + 1)
    scaling: RopeScaling | None = None
    ntk_alpha: float = 1.0  # the user's NTK factor on theta
    linear_factor: float = 1.0  # the user's linear factor on positions; replaces the file's linear scaling
    # M-RoPE: frequencies for each position plane (time, height, width); () means one plane.
    mrope_sections: tuple[int, ...] = ()
    # The planes take turns (time, height, width, time, …) as far as their sections reach, the rest is time (Qwen3.5);
    # else each section is one run of frequencies.
    mrope_interleaved: bool = False
