"""Rotary positions: the base, the width, and how the frequencies are stretched beyond the trained length.

The numbers become tables in a backend; this file only says which numbers. Every method is *static*: it is
fixed by the configured length when the model loads, never by the sequence at hand, so that a token's position
means the same whatever the chunk size or the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicNtkScaling:
    """NTK-aware base, raised once the configured length exceeds `original`."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """A ramp from kept to divided frequencies, by how often each turns in `original` positions."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # sin and cos are multiplied by it
    truncate: bool = True  # round the ramp's ends to whole frequencies

    @staticmethod
    def mscale(factor: float, weight: float = 1.0) -> float:
        """How much sin and cos must grow to keep attention as sharp as before."""
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    @classmethod
    def with_defaults(cls, factor: float, original_max_positions: int) -> Self:
        """Yarn with its usual numbers."""
        return cls(factor, original_max_positions, attention_factor=cls.mscale(factor))


@dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency divided by its own factor: one list up to `original` positions, one beyond."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float = 1.0


RopeScaling = LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """How one attention layer turns positions into rotations."""

    theta: float
    dim: int  # how many of the head's leading dimensions turn
    style: Literal["neox", "gptj"] = "neox"  # pairs (i, i + dim/2), or (2i, 2i + 1)
    scaling: RopeScaling | None = None
    alpha: float = 1.0  # the user's NTK factor on theta
    divisor: float = 1.0  # the user's linear factor on positions; replaces the file's linear scaling
    mrope_sections: tuple[
        int, ...
    ] = ()  # frequencies per position plane (time, height, width); () means one plane
