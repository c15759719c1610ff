"""One decoder layer, in its forms, and the transfer between layers on different devices.

A layer has a token mixer, which reads and writes the layer's part of the cache (`nn.attention`, `nn.recurrent`), and
an MLP, which sees each token alone (`nn.mlp`). Some families have layers with only one of them.

Block            x ─┬─ norm ─ mixer ─ post ─(+)─┬─ norm ─ mlp ─ post ─(+)─
                    └───────────────────────┘   └──────────────────────┘

ParallelBlock    x ─┬─ norm ─┬─ mixer ─(+)─(+)─
                    │        └─ mlp ────┘   │
                    └───────────────────────┘

MixerBlock       x ─┬─ norm ─ mixer ─(+)─          MlpBlock       x ─┬─ norm ─ mlp ─(+)─
                    └─────────────────┘                              └───────────────┘

A block leaves its last addition to the next one's first norm, so that a backend can do both in one launch
(add_norm): the residual stream between blocks is a sum and a pending residual, which is still to be added to
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.interface import AddNormFn, LayerKVCache, NormFn
from .batch import Batch
from .mlp import MlpLike
from .recurrent import Mixer


class BlockLike(Protocol):
    """A decoder layer of any form."""

    @property
    def mixer(self) -> Mixer | None:
        """The layer's token mixer."""
        ...

    @property
    def mlp(self) -> MlpLike | None:
        """The layer's MLP."""
        ...

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in and out: (rows, tokens, hidden) and the pending residual."""
        ...

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store in the cache what `forward` would store, and compute nothing else."""
        ...


class Block:
    """Mixer, then MLP, each with a residual connection."""

    def __init__(
        self,
        mixer: Mixer,
        mlp: MlpLike,
        attn_norm: AddNormFn,
        mlp_norm: AddNormFn,
        attn_post_norm: NormFn,
        mlp_post_norm: NormFn,
    ) -> None:
        self.mixer, self.mlp = mixer, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.attn_norm(x, pending_residual)
        x, normed = self.mlp_norm(x, self.attn_post_norm(self.mixer.forward(normed, batch, kv)))
        return x, self.mlp_post_norm(self.mlp.forward(normed, batch))

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store what the mixer stores: an MLP has no cache."""
        self.mixer.fill_cache(self.attn_norm(x, pending_residual)[1], batch, kv)


class ParallelBlock:
    """Mixer and MLP in parallel, on the same normalised input."""

    def __init__(self, mixer: Mixer, mlp: MlpLike, norm: AddNormFn, post_norm: NormFn) -> None:
        self.mixer, self.mlp = mixer, mlp
        self.norm, self.post_norm = norm, post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.norm(x, pending_residual)
        return x, self.post_norm(self.mixer.forward(normed, batch, kv) + self.mlp.forward(normed, batch))

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store what the mixer stores: an MLP has no cache."""
        self.mixer.fill_cache(self.norm(x, pending_residual)[1], batch, kv)


class MixerBlock:
    """A layer that is a mixer alone."""

    mlp = None

    def __init__(self, mixer: Mixer, norm: AddNormFn, post_norm: NormFn) -> None:
        self.mixer = mixer
        self.norm, self.post_norm = norm, post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.norm(x, pending_residual)
        return x, self.post_norm(self.mixer.forward(normed, batch, kv))

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store what the mixer stores: an MLP has no cache."""
        self.mixer.fill_cache(self.norm(x, pending_residual)[1], batch, kv)


class MlpBlock:
    """A layer that is an MLP alone."""

    mixer = None

    def __init__(self, mlp: MlpLike, norm: AddNormFn, post_norm: NormFn) -> None:
        self.mlp = mlp
        self.norm, self.post_norm = norm, post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.norm(x, pending_residual)
        return x, self.post_norm(self.mlp.forward(normed, batch))

    def fill_cache(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Do nothing: it has no cache."""


TransferFn = Callable[[Tensor, Tensor | None, Batch], tuple[Tensor, Tensor | None, Batch]]
"""(x, pending residual, batch) → the same on the device of the next module."""


def no_transfer(x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None, Batch]:
    """The next module is on the same device."""
    return x, pending_residual, batch


class DeviceTransfer:
    """Move the residual stream and the batch to another device; a GPU becomes the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None, Batch]:
        """All on this device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return (
            x.to(self.device),
            None if pending_residual is None else pending_residual.to(self.device),
            batch.to(self.device),
        )
