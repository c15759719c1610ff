"""Recurrent mixers in plain torch: the definition of correct, token after token in float32.

Every backend computes a recurrence in this order, and its sums in an order of its own that is the same for one token
and for many. So a state is a function of the tokens before it, and chunked prefill, decoding, drafts and replays after
a rewind agree bit for bit where the projections do. A chunked form on tensor cores would differ in the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from .interface import AttnMetadata, DeltaNetParams, Mamba2Params, RecurrentState, StateSlots

L2_NORM_EPS = 1e-6
"""Added to the squared length of q and k by the delta net."""


def read_states(states: Tensor, slots: StateSlots | None, rows: int) -> Tensor:
    """Each row's state in float32, (rows, …); zeros where a row has none yet."""
    if slots is None:
        return torch.zeros(rows, *states.shape[1:], device=states.device)
    fresh = (slots.source < 0).view(-1, *[1] * (states.dim() - 1))
    return states[slots.source.clamp(min=0)].float().masked_fill(fresh, 0.0)


def write_states(states: Tensor, slots: StateSlots | None, token: int, values: Tensor) -> None:
    """Store each row's state after a token, where the pass asks for it."""
    if slots is not None:
        rows = (slots.targets[:, token] >= 0).nonzero()[:, 0]
        states[slots.targets[rows, token]] = values[rows].to(states.dtype)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, slots: StateSlots | None
) -> Tensor:
    """Each channel's convolution over its last inputs, (rows, tokens, channels) in float32.

    `weight` is (channels, kernel), `states` (slots, kernel - 1, channels).
    """
    rows, tokens, channels = x.shape
    past = weight.shape[1] - 1
    before = torch.zeros(rows, past, channels, device=x.device) if states is None else read_states(states, slots, rows)
    inputs = torch.cat((before, x.float()), 1)  # (rows, kernel - 1 + tokens, channels)
    out = torch.zeros(rows, tokens, channels, device=x.device) if bias is None else bias.expand(rows, tokens, channels)
    for i in range(past + 1):
        out = out + inputs[:, i : i + tokens] * weight[:, i]
    if states is not None and slots is not None:
        for token in range(tokens):
            write_states(states, slots, token, inputs[:, token + 1 : token + 1 + past])
    return out


@dataclass(frozen=True, eq=False)
class ReferenceDeltaNet:
    """Convolution, delta rule, norm and gate of a `spec.DeltaNet`."""

    mixer: spec.DeltaNet
    params: DeltaNetParams
    dtype: torch.dtype

    def __call__(
        self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, state: RecurrentState | None, metadata: AttnMetadata
    ) -> Tensor:
        """(rows, tokens, …) projections → (rows, tokens, value width)."""
        m, slots = self.mixer, metadata.state_slots
        rows, tokens = qkv.shape[:2]
        mixed = F.silu(causal_conv(qkv, self.params.conv, None, None if state is None else state.conv, slots))
        q, k, v = mixed.split_with_sizes((m.key_width, m.key_width, m.value_width), -1)
        share = m.value_heads // m.key_heads
        q, k = (_l2_normalized(x.reshape(rows, tokens, -1, m.key_dim)).repeat_interleave(share, 2) for x in (q, k))
        v = v.reshape(rows, tokens, -1, m.value_dim)
        gate = F.softplus(a.float() + self.params.dt_bias).view(rows, tokens, m.value_heads, -1)
        decay = torch.exp(-self.params.a_log.exp()[:, None] * gate)  # (rows, tokens, heads, 1 or key_dim)
        beta = b.float().sigmoid() * m.beta_scale
        out = self._recurrence(q * m.key_dim**-0.5, k, v, decay, beta, state, slots)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + m.norm_eps) * self.params.norm
        act = F.silu if m.gate_act == "silu" else torch.sigmoid
        return (out * act(z.float()).view_as(out)).flatten(2).to(self.dtype)

    def _recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: RecurrentState | None,
        slots: StateSlots | None,
    ) -> Tensor:
        m, (rows, tokens) = self.mixer, q.shape[:2]
        if state is None or state.matrix is None:
            s = torch.zeros(rows, m.value_heads, m.key_dim, m.value_dim, device=q.device)
        else:
            s = read_states(state.matrix, slots, rows)
        out = torch.empty_like(v)
        for t in range(tokens):
            key = k[:, t, :, :, None]  # (rows, heads, key_dim, 1)
            s = s * decay[:, t, :, :, None]
            delta = (v[:, t] - (s * key).sum(2)) * beta[:, t, :, None]
            s = s + key * delta[:, :, None]
            out[:, t] = (s * q[:, t, :, :, None]).sum(2)
            if state is not None and state.matrix is not None:
                write_states(state.matrix, slots, t, s)
        return out


@dataclass(frozen=True, eq=False)
class ReferenceMamba2:
    """Convolution, state-space recurrence, gate and norm of a `spec.Mamba2`."""

    mixer: spec.Mamba2
    params: Mamba2Params
    dtype: torch.dtype

    def __call__(self, projected: Tensor, state: RecurrentState | None, metadata: AttnMetadata) -> Tensor:
        """The projection to z, x, B, C, dt → (rows, tokens, width)."""
        m, p, slots = self.mixer, self.params, metadata.state_slots
        rows, tokens = projected.shape[:2]
        bc_width = m.groups * m.state_dim
        parts = projected.float().split_with_sizes((m.width, m.width, bc_width, bc_width, m.heads), -1)
        z, x, b, c, dt = (part * scale for part, scale in zip(parts, m.part_scales, strict=True))
        mixed = causal_conv(torch.cat((x, b, c), -1), p.conv, p.conv_bias, None if state is None else state.conv, slots)
        x, b, c = F.silu(mixed).split_with_sizes((m.width, bc_width, bc_width), -1)
        x = x.reshape(rows, tokens, m.heads, m.head_dim)
        share = m.heads // m.groups
        b, c = (v.reshape(rows, tokens, m.groups, m.state_dim).repeat_interleave(share, 2) for v in (b, c))
        dt = F.softplus(dt + p.dt_bias).clamp(*m.dt_limits)
        decay = torch.exp(dt * -p.a_log.exp())  # (rows, tokens, heads)
        y = self._recurrence(x, b, c, dt, decay, state, slots) + x * p.d[:, None]
        return self._gated_norm(y.flatten(2), z).to(self.dtype)

    def _recurrence(
        self,
        x: Tensor,
        b: Tensor,
        c: Tensor,
        dt: Tensor,
        decay: Tensor,
        state: RecurrentState | None,
        slots: StateSlots | None,
    ) -> Tensor:
        m, (rows, tokens) = self.mixer, x.shape[:2]
        if state is None or state.matrix is None:
            s = torch.zeros(rows, m.heads, m.head_dim, m.state_dim, device=x.device)
        else:
            s = read_states(state.matrix, slots, rows)
        out = torch.empty_like(x)
        for t in range(tokens):
            s = s * decay[:, t, :, None, None] + (x[:, t] * dt[:, t, :, None])[..., None] * b[:, t, :, None]
            out[:, t] = (s * c[:, t, :, None]).sum(-1)
            if state is not None and state.matrix is not None:
                write_states(state.matrix, slots, t, s)
        return out

    def _gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        norm, gate = self.mixer.norm, F.silu(z)
        if norm is None or self.params.norm is None:
            return y * gate
        if not self.mixer.norm_before_gate:
            y = y * gate
        grouped = y.view(*y.shape[:-1], self.mixer.norm_groups, -1)
        y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2) * self.params.norm
        return y * gate if self.mixer.norm_before_gate else y


@dataclass(frozen=True, eq=False)
class ReferenceShortConv:
    """The gated short convolution of a `spec.ShortConv`."""

    mixer: spec.ShortConv
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def __call__(self, projected: Tensor, state: RecurrentState | None, metadata: AttnMetadata) -> Tensor:
        """The projection to B, C, x → (rows, tokens, width)."""
        b, c, x = projected.float().chunk(3, -1)
        states = None if state is None else state.conv
        return (c * causal_conv(b * x, self.weight, self.bias, states, metadata.state_slots)).to(self.dtype)


def _l2_normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
