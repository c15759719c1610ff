"""The reference backend: every operation in plain torch, on any device. It is the definition of correct.

`ReferenceBackend` runs every part of a model and declines none; it is the oracle of the other backends'
tests. They also use its attention, RoPE tables and norms for calls that their kernels do not take.
`kernels.dispatch`, `lora`, `quantize` and tests import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..errors import Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from . import interface
from .reference_recurrent import ReferenceDeltaNet, ReferenceMamba2, ReferenceShortConv

ACTIVATIONS: dict[spec.Activation, interface.ActivationFn] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """RMS norm over the last dimension; a scale of (heads, head_dim) gives each head its own."""

    scale: Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.scale).to(self.dtype)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Layer norm over the last dimension."""

    scale: Tensor
    bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        wide = F.layer_norm(x.float(), (x.shape[-1],), eps=self.eps) * self.scale
        return (wide if self.bias is None else wide + self.bias).to(self.dtype)


@dataclass(frozen=True, eq=False)
class AddNorm:
    """A residual addition, then a norm."""

    norm: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        total = x if y is None else x + y
        return total, self.norm(total)


def frequencies(rope: spec.Rope, length: int) -> tuple[Tensor, float]:
    """(dim / 2,) angles for one position step, and the factor on sin and cos, for the configured length."""
    theta, dim, method = rope.theta, rope.dim, rope.scaling
    theta *= rope.ntk_alpha ** (dim / (dim - 2)) if dim > 2 else 1.0
    if isinstance(method, spec.DynamicNtkScaling) and length > method.original_max_positions and dim > 2:
        theta *= (method.factor * length / method.original_max_positions - (method.factor - 1)) ** (dim / (dim - 2))
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
    return inv_freq / rope.linear_factor, magnitude


class RotaryEmbedding:
    """Applies RoPE to queries and keys by precomputed tables."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device) -> None:
        # float32 whatever the activations' dtype: tables in 16 bits drift in long contexts
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
    """(dim / 2,) the M-RoPE axis of each frequency."""
    sections = rope.mrope_sections or (rope.dim // 2,)
    if rope.mrope_interleaved and len(sections) > 1:
        axes = torch.zeros(rope.dim // 2, dtype=torch.int64)
        for plane, count in enumerate(sections[1:], 1):
            axes[plane : count * len(sections) : len(sections)] = plane
        return axes
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))


def _llama3(inv_freq: Tensor, s: spec.Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / inv_freq
    blend = (s.original_max_positions / wavelengths - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
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


@dataclass(frozen=True)
class ReferenceAttention:
    """RoPE, store new keys and values in the cache, attend."""

    rope: interface.RopeFn
    scale: float
    window: int | None
    softcap: float | None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: interface.LayerKVCache, metadata: interface.AttnMetadata
    ) -> Tensor:
        """(rows, tokens, heads, head_dim) q, k, v → (rows, tokens, heads · head_dim)."""
        q, k = self.rope(q, k, metadata.positions)
        keys, values = kv.update(k, v, metadata)
        mask = attention_mask(q.shape[1], metadata, self.window)
        attend = self._sdpa if self.softcap is None else self._softcapped
        y = attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        return y.transpose(1, 2).flatten(2)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None and q.shape[2] > 1
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=gqa
        )

    def _softcapped(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert self.softcap is not None
        if mask is None:
            shape = (q.shape[2], k.shape[2])
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
        q_per_kv = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(q_per_kv, 1), v.repeat_interleave(q_per_kv, 1)
        scores = (q @ k.transpose(2, 3)).float() * self.scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v


def attention_mask(tokens: int, metadata: interface.AttnMetadata, window: int | None) -> Tensor | None:
    """(rows or 1, 1, tokens, max_kv_len) boolean mask; None where `is_causal` is enough.

    A query always sees itself: the softmax of a padding row without keys would be NaN and spread.
    """
    total = metadata.max_kv_len
    window_size = total if window is None else min(window, total)
    if metadata.uniform and window_size == total and (tokens == 1 or tokens == total):
        return None
    device = metadata.past_lens.device
    keys = torch.arange(total, device=device)
    if metadata.uniform:
        query = torch.arange(total - tokens, total, device=device)[None]  # (1, tokens)
    else:
        query = metadata.past_lens[:, None] + torch.arange(tokens, device=device)  # (rows, tokens)
    distance = query[:, :, None] - keys  # (rows, tokens, max_kv_len)
    mask = distance >= 0
    if window_size < total:
        mask &= distance < window_size
    if metadata.mask is not None:
        mask &= metadata.mask[:, None, :]
        mask |= distance == 0
    return mask[:, None]


@dataclass(frozen=True, eq=False)
class Router:
    """Which experts a token is routed to, and the weight of each, from the router's logits.

    Ties go to the expert with the lower number, on every device.
    """

    moe: spec.Moe
    selection_bias: Tensor | None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, experts) logits → weights in float32 and ids, (tokens, active)."""
        moe = self.moe
        scores = logits.float().softmax(-1) if moe.routing == "softmax" else logits.float().sigmoid()
        ranking = scores if self.selection_bias is None else scores + self.selection_bias
        if moe.active_groups < moe.routing_groups:
            ranking = self._in_selected_groups(ranking)
        ids = ranking.sort(dim=-1, descending=True, stable=True)[1][:, : moe.active]
        weights = scores.gather(1, ids)
        if moe.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if moe.routing == "softmax" else total + 1e-20)
        return weights * moe.weight_scale, ids

    def _in_selected_groups(self, ranking: Tensor) -> Tensor:
        """The ranking with -inf for experts outside the groups whose two best experts rank highest together."""
        grouped = ranking.view(len(ranking), self.moe.routing_groups, -1)
        group_rank = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1)
        selected = group_rank.sort(dim=-1, descending=True, stable=True)[1][:, : self.moe.active_groups]
        keep = torch.zeros_like(group_rank, dtype=torch.bool).scatter_(1, selected, True)
        return grouped.masked_fill(~keep[..., None], float("-inf")).flatten(-2)


@dataclass(frozen=True, eq=False)
class ReferenceMoe:
    """MoE: one expert after the other, each on the tokens routed to it."""

    router: Router
    act: interface.ActivationFn
    gate: list[interface.LinearFn]
    up: list[interface.LinearFn]
    down: list[interface.LinearFn]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat = x.flatten(0, 1)
        routing_weights, expert_ids = self.router(logits.flatten(0, 1))
        out = torch.zeros_like(flat)
        for expert in range(len(self.up)):
            token, slot = torch.where(expert_ids == expert)
            if len(token):
                rows = flat[token]
                up = self.up[expert](rows)
                hidden = self.act(self.gate[expert](rows)) * up if self.gate else self.act(up)
                output = self.down[expert](hidden)
                out.index_add_(0, token, output * routing_weights[token, slot, None].to(output.dtype))
        return out.view_as(x)


class ReferenceBackend:
    """Every part of a model in plain torch."""

    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: Weight) -> interface.LinearFn:
        """Dense weights as they are; any other format is dequantised in each call."""
        if isinstance(weight, DenseWeight):
            return partial(F.linear, weight=weight.data, bias=weight.bias)
        return partial(_dequantized, weight, self.dtype)

    def embedding(self, weight: Weight) -> interface.EmbeddingFn:
        """Rows of a dense table; of a packed one, only the requested columns are dequantised."""
        if isinstance(weight, DenseWeight):
            return partial(F.embedding, weight=weight.data)
        if isinstance(weight, PackedWeight):
            return partial(_dequantized_columns, weight)
        raise Unsupported(f"an embedding stored as {weight.describe()} is not known")

    def norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.NormFn:
        """Computed in float32, rounded once at the end."""
        scale = weight.float() + norm.offset
        if norm.kind == "rms":
            return RmsNorm(scale, norm.eps, self.dtype)
        return LayerNorm(scale, bias, norm.eps, self.dtype)

    def add_norm(self, norm: spec.Norm, weight: Tensor, bias: Tensor | None) -> interface.AddNormFn:
        """The addition, then the norm."""
        return AddNorm(self.norm(norm, weight, bias))

    def activation(self, act: spec.Activation) -> interface.ActivationFn:
        """From ACTIVATIONS."""
        return ACTIVATIONS[act]

    def gated(self, act: spec.Activation) -> interface.GatedActivationFn:
        """The activation, then the product."""
        return partial(_gated, self.activation(act))

    def rope(self, rope: spec.Rope, length: int) -> interface.RopeFn:
        """Tables of all positions."""
        return RotaryEmbedding(rope, length, self.device)

    def attention(self, attn: spec.Attention, rope: interface.RopeFn) -> interface.AttentionFn:
        """Softmax over all visible keys."""
        return ReferenceAttention(rope, attn.scale, attn.window, attn.softcap)

    def moe(
        self,
        moe: spec.Moe,
        gate: list[interface.LinearFn],
        up: list[interface.LinearFn],
        down: list[interface.LinearFn],
        selection_bias: Tensor | None = None,
    ) -> interface.MoeFn:
        """One expert after the other, each on the tokens routed to it."""
        return ReferenceMoe(Router(moe, selection_bias), self.activation(moe.act), gate, up, down)

    def delta_net(self, mixer: spec.DeltaNet, params: interface.DeltaNetParams) -> interface.DeltaNetFn:
        """Token after token."""
        return ReferenceDeltaNet(mixer, params, self.dtype)

    def mamba2(self, mixer: spec.Mamba2, params: interface.Mamba2Params) -> interface.Mamba2Fn:
        """Token after token."""
        return ReferenceMamba2(mixer, params, self.dtype)

    def short_conv(self, mixer: spec.ShortConv, conv: Tensor, bias: Tensor | None) -> interface.ShortConvFn:
        """All tokens at once: each output depends on its last inputs alone."""
        return ReferenceShortConv(mixer, conv, bias, self.dtype)


def _gated(act: interface.ActivationFn, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _dequantized_columns(weight: PackedWeight, ids: Tensor) -> Tensor:
    return weight.take_columns(ids.flatten()).dequantize().T.view(*ids.shape, -1)


def _dequantized(weight: Weight, dtype: torch.dtype, x: Tensor) -> Tensor:
    y = x @ weight.dequantize().to(dtype)
    return y if weight.bias is None else y + weight.bias
