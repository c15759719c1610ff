"""RoPE: its tables and their use. Every scaling method becomes a list of frequencies and one magnitude.

Angles and rotations are float32, whatever the activations' dtype: tables in 16 bits drift in long
contexts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import spec


def frequencies(rope: spec.Rope, length: int) -> tuple[Tensor, float]:
    """(dim / 2,) angles for one position step, and the factor on sin and cos, for the configured length."""
    theta, dim, method = rope.theta, rope.dim, rope.scaling
    theta *= rope.alpha ** (dim / (dim - 2)) if dim > 2 else 1.0
    if isinstance(method, spec.DynamicNtkScaling) and length > method.original_max_positions and dim > 2:
        theta *= (method.factor * length / method.original_max_positions - (method.factor - 1)) ** (
            dim / (dim - 2)
        )
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / theta**exponents
    magnitude = 1.0
    match method:
        case spec.LinearScaling(factor):
            inv_freq = inv_freq / factor
        case spec.Llama3Scaling():
            inv_freq = _llama3(inv_freq, method)
        case spec.YarnScaling():
            inv_freq, magnitude = _yarn(inv_freq, theta, dim, method), method.attention_factor
        case spec.LongRopeScaling():
            chosen = method.long_factors if length > method.original_max_positions else method.short_factors
            inv_freq, magnitude = 1.0 / (torch.tensor(chosen) * theta**exponents), method.attention_factor
    return inv_freq / rope.divisor, magnitude


class RotaryEmbedding:
    """Applies RoPE to queries and keys by precomputed tables."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device) -> None:
        step, magnitude = frequencies(rope, length)
        angles = torch.outer(torch.arange(length, dtype=torch.int64).float(), step)
        self.cos = (angles.cos() * magnitude).to(device)  # (length, dim / 2)
        self.sin = (angles.sin() * magnitude).to(device)
        self.dim = rope.dim
        self.rotate = _rotate_neox if rope.style == "neox" else _rotate_gptj
        self.mrope_axis = _mrope_axes(rope).to(device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after RoPE, which rotates the first `dim` numbers of each head."""
        cos, sin = self._lookup(self.cos, positions), self._lookup(self.sin, positions)
        return self._apply(q, cos, sin), self._apply(k, cos, sin)

    def _lookup(self, table: Tensor, positions: Tensor) -> Tensor:
        """(rows, tokens, 1, dim / 2): each frequency's value at the position of its M-RoPE axis."""
        if positions.dim() == 2:
            return table[positions].unsqueeze(2)
        columns = torch.arange(table.shape[1], device=table.device)
        chosen = positions[self.mrope_axis].permute(1, 2, 0)  # (rows, tokens, dim / 2)
        return table[chosen, columns].unsqueeze(2)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = self.rotate(x[..., : self.dim].float(), cos, sin).to(x.dtype)
        return rotated if self.dim == x.shape[-1] else torch.cat((rotated, x[..., self.dim :]), -1)


def _rotate_neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rotate_gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _mrope_axes(rope: spec.Rope) -> Tensor:
    """(dim / 2,) which position plane each frequency follows."""
    sections = rope.mrope_sections or (rope.dim // 2,)
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))


def _llama3(inv_freq: Tensor, s: spec.Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / inv_freq
    blend = (s.original_max_positions / wavelengths - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    middle = (1 - blend) * inv_freq / s.factor + blend * inv_freq
    slow, fast = (
        wavelengths > s.original_max_positions / s.low_freq_factor,
        wavelengths < s.original_max_positions / s.high_freq_factor,
    )
    return torch.where(slow, inv_freq / s.factor, torch.where(fast, inv_freq, middle))


def _yarn(inv_freq: Tensor, theta: float, dim: int, s: spec.YarnScaling) -> Tensor:
    def column(rotations: float) -> float:
        return dim * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = column(s.beta_fast), column(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return inv_freq / s.factor * ramp + inv_freq * (1 - ramp)
