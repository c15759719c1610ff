"""Random recurrent mixers of any shape, their inputs and slots, and passes over them in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from exlm import spec
from exlm.kernels import interface as b
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Batch

Mixer = spec.DeltaNet | spec.Mamba2 | spec.ShortConv
Kernel = Callable[[tuple[Tensor, ...], b.RecurrentState | None, b.AttnMetadata], Tensor]
"""(projections, states, metadata) → output."""


@dataclass
class Case:
    """A mixer with its parameters, float32."""

    mixer: Mixer
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        m = self.mixer
        if isinstance(m, spec.DeltaNet):
            channels, heads = 2 * m.key_width + m.value_width, m.value_heads
            self.params: Any = b.DeltaNetParams(
                self._randn(channels, m.conv_kernel),
                self._randn(heads) * 0.5,
                self._randn(m.decay_width),
                1 + 0.1 * self._randn(m.value_dim),
            )
            self.widths = [channels, m.value_width, m.decay_width, heads]
        elif isinstance(m, spec.Mamba2):
            self.params = b.Mamba2Params(
                self._randn(m.conv_channels, m.conv_kernel),
                self._randn(m.conv_channels) if m.conv_bias else None,
                self._randn(m.heads) * 0.5,
                self._randn(m.heads),
                self._randn(m.heads),
                None if m.norm is None else 1 + 0.1 * self._randn(m.width),
            )
            self.widths = [m.width + m.conv_channels + m.heads]
        else:
            self.params = self._randn(m.width, m.conv_kernel), self._randn(m.width) if m.bias else None
            self.widths = [3 * m.width]

    def _randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes).to(self.device)

    def made_by(self, backend: Any) -> Any:
        """The mixer's kernel in a backend."""
        m = self.mixer
        if isinstance(m, spec.DeltaNet):
            return backend.delta_net(m, self.params)
        if isinstance(m, spec.Mamba2):
            return backend.mamba2(m, self.params)
        return backend.short_conv(m, *self.params)

    def bind(self, backend: Any) -> Kernel:
        """The same with the projections as a tuple, as they are for every mixer."""
        kernel = self.made_by(backend)
        return lambda inputs, state, metadata: kernel(*inputs, state, metadata)

    def reference(self) -> Kernel:
        """In plain torch, with an output in float32."""
        return self.bind(ReferenceBackend(self.device, torch.float32))

    def inputs(self, rows: int, tokens: int) -> tuple[Tensor, ...]:
        """Projections in half, each a part of a wider tensor as joint projections leave them."""
        wide = torch.randn(rows, tokens, sum(self.widths) + 3).half().to(self.device)
        return wide.split_with_sizes([*self.widths, 3], -1)[:-1]

    def states(self, slots: int, conv_dtype: torch.dtype = torch.float16) -> b.RecurrentState:
        """Slots of random numbers."""
        shape = self.mixer.state
        matrix = None if shape.matrix is None else self._randn(slots, *shape.matrix)
        return b.RecurrentState(self._randn(slots, *shape.conv).half().to(conv_dtype), matrix)


def metadata(slots: b.StateSlots | None, rows: int, tokens: int, device: torch.device) -> Batch:
    """A batch that says only where states are."""
    zeros = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    return Batch(
        ids=zeros, positions=zeros, past_lens=zeros[:, 0], page_table=zeros, max_kv_len=tokens, uniform=False,
        state_slots=slots,
    )  # fmt: skip


def run(
    kernel: Kernel,
    inputs: Sequence[Tensor],
    state: b.RecurrentState,
    source: Tensor,
    targets: Tensor,
    chunks: Sequence[int],
) -> Tensor:
    """Pass by pass; between passes each row's state waits in its target, or in a slot of its own at the end of `state`.

    `targets` is (rows, tokens), as for one pass.
    """
    rows, tokens = inputs[0].shape[:2]
    spare = len(state.conv) - 2 * rows
    outputs, start = [], 0
    for number, length in enumerate(chunks):
        part = slice(start, start + length)
        wanted = targets[:, part].clone()
        last = spare + torch.arange(rows, device=source.device) + number % 2 * rows
        if start + length < tokens:
            wanted[:, -1] = last = torch.where(wanted[:, -1] < 0, last, wanted[:, -1])
        pass_metadata = metadata(b.StateSlots(source, wanted), rows, length, source.device)
        outputs.append(kernel(tuple(x[:, part] for x in inputs), state, pass_metadata))
        source, start = last, start + length
    assert start == tokens
    return torch.cat(outputs, 1)


DELTA_NETS = {
    "head decay": spec.DeltaNet(1, 3, 32, 16, 4, 1e-6),
    "channel decay": spec.DeltaNet(2, 2, 16, 48, 3, 1e-5, decay="channel", gate_act="sigmoid", beta_scale=2.0),
}
MAMBAS = {
    "norm of groups": spec.Mamba2(4, 16, 2, 32, 4, spec.Norm(eps=1e-5), norm_groups=2, dt_limits=(0.1, 2.0)),
    "scaled, norm first": replace(
        spec.Mamba2(3, 24, 1, 64, 4, spec.Norm(eps=1e-5), norm_before_gate=True, conv_bias=False),
        part_scales=(0.7, 1.3, 0.9, 1.1, 0.8),
    ),
    "no norm": spec.Mamba2(2, 16, 1, 32, 2, None),
}
SHORT_CONVS = {"short": spec.ShortConv(40, 3), "short with bias": spec.ShortConv(300, 4, bias=True)}
SMALL: dict[str, Mixer] = {**DELTA_NETS, **MAMBAS, **SHORT_CONVS}
