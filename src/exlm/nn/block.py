"""One decoder layer, in its two forms, and the transfer between layers on different devices.

A layer has a token mixer, which reads and writes the layer's part of the cache (`nn.attention`), and an MLP,
which sees each token alone (`nn.mlp`).

Block            x ─┬─ norm ─ attention ─ post ─(+)─┬─ norm ─ mlp ─ post ─(+)─
                    └───────────────────────────┘   └──────────────────────┘

ParallelBlock    x ─┬─ norm ─┬─ attention ─(+)─(+)─
                    │        └─ mlp ────────┘   │
                    └───────────────────────────┘

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
from .attention import Attention
from .batch import Batch
from .mlp import MlpLike


class BlockLike(Protocol):
    """A decoder layer of either form."""

    @property
    def attn(self) -> Attention:
        """The layer's attention."""
        ...

    @property
    def mlp(self) -> MlpLike:
        """The layer's MLP."""
        ...

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in and out: (rows, tokens, hidden) and the pending residual."""
        ...

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Store the keys and values that `forward` would store, and compute nothing else."""
        ...


class Block:
    """Attention, then MLP, each with a residual connection."""

    def __init__(
        self,
        attn: Attention,
        mlp: MlpLike,
        attn_norm: AddNormFn,
        mlp_norm: AddNormFn,
        attn_post_norm: NormFn,
        mlp_post_norm: NormFn,
    ) -> None:
        self.attn, self.mlp = attn, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.attn_norm(x, pending_residual)
        x, normed = self.mlp_norm(x, self.attn_post_norm(self.attn.forward(normed, batch, kv)))
        return x, self.mlp_post_norm(self.mlp.forward(normed, batch))

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Project and attend; the attention's output is not used."""
        self.attn.head_outputs(self.attn_norm(x, pending_residual)[1], batch, kv)


class ParallelBlock:
    """Attention and MLP in parallel, on the same normalised input."""

    def __init__(self, attn: Attention, mlp: MlpLike, norm: AddNormFn, post_norm: NormFn) -> None:
        self.attn, self.mlp = attn, mlp
        self.norm, self.post_norm = norm, post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in and out."""
        x, normed = self.norm(x, pending_residual)
        return x, self.post_norm(self.attn.forward(normed, batch, kv) + self.mlp.forward(normed, batch))

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: LayerKVCache) -> None:
        """Project and attend; the attention's output is not used."""
        self.attn.head_outputs(self.norm(x, pending_residual)[1], batch, kv)


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
