"""Recurrent mixers: gated delta net, Mamba 2, short convolution; and attention beside one of them.

A mixer projects, lets a kernel do everything between its projections (convolution, recurrence, norm, gate), and
projects back. The kernel reads and writes the layer's recurrent state in the slots that the batch names.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels.interface import DeltaNetFn, LayerKVCache, Mamba2Fn, RecurrentState, ShortConvFn
from .attention import Attention, Projection
from .batch import Batch
from .linear import Linear


class Mixer(Protocol):
    """A token mixer: reads and writes the layer's cache."""

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store what `forward` would store, and compute nothing else."""
        ...


class LowRankLinear:
    """up(down(x))."""

    def __init__(self, down: Linear, up: Linear) -> None:
        self.down, self.up = down, up

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, inputs) → (rows, tokens, outputs)."""
        return self.up.forward(self.down.forward(x, batch), batch)


class DeltaNet:
    """Gated delta net, or Kimi delta attention: projections around a `DeltaNetFn`."""

    def __init__(
        self,
        kernel: DeltaNetFn,
        q: Linear,
        k: Linear,
        v: Linear,
        z: Projection,
        a: Projection,
        b: Linear,
        o: Linear,
    ) -> None:
        self.kernel = kernel
        self.q, self.k, self.v, self.z, self.a, self.b, self.o = q, k, v, z, a, b, o

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.o.forward(self._mix(x, batch, kv.state), batch)

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store the state."""
        self._mix(x, batch, kv.state)

    def _mix(self, x: Tensor, batch: Batch, state: RecurrentState | None) -> Tensor:
        x = with_zeroed_padding(x, batch)
        qkv = torch.cat([part.forward(x, batch) for part in (self.q, self.k, self.v)], -1)
        z, a, b = (part.forward(x, batch) for part in (self.z, self.a, self.b))
        return self.kernel(qkv, z, a, b, state, batch)


class InOutMixer:
    """A mixer with one projection before its kernel and one after: Mamba 2, or a short convolution."""

    def __init__(
        self, kernel: Mamba2Fn | ShortConvFn, in_proj: Linear, out_proj: Linear, in_scale: float = 1.0
    ) -> None:
        self.kernel = kernel
        self.in_proj, self.out_proj = in_proj, out_proj
        self.in_scale = in_scale

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.out_proj.forward(self._mix(x, batch, kv.state), batch)

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store the state."""
        self._mix(x, batch, kv.state)

    def _mix(self, x: Tensor, batch: Batch, state: RecurrentState | None) -> Tensor:
        x = with_zeroed_padding(x, batch)
        if self.in_scale != 1.0:
            x = x * self.in_scale
        return self.kernel(self.in_proj.forward(x, batch), state, batch)


class ParallelMixers:
    """Attention and a recurrent mixer on the same input; their scaled outputs are added."""

    def __init__(
        self, attention: Attention, recurrent: Mixer, scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ) -> None:
        """`scales`: on the attention's input and output, and on the recurrent mixer's output."""
        self.attention, self.recurrent = attention, recurrent
        self.attention_in, self.attention_out, self.recurrent_out = scales

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        attended = self.attention.forward(x * self.attention_in, batch, kv) * self.attention_out
        return self.recurrent.forward(x, batch, kv) * self.recurrent_out + attended

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Store keys, values and the state."""
        self.attention.fill_cache(x * self.attention_in, batch, kv)
        self.recurrent.fill_cache(x, batch, kv)


def with_zeroed_padding(x: Tensor, batch: Batch) -> Tensor:
    """x with zeros in place of padding tokens: left padding then leaves a state of zeros as it is."""
    return x if batch.mask is None else x * batch.mask[:, -x.shape[1] :, None].to(x.dtype)
