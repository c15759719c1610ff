"""The border between two devices: what flows from block to block crosses it here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .batch import Batch

TransferFn = Callable[[Tensor, Tensor | None, Batch], tuple[Tensor, Tensor | None, Batch]]
"""The residual stream (a sum and what belongs to it) and the batch, brought to where the next module is."""


def no_transfer(
    x: Tensor, pending_residual: Tensor | None, batch: Batch
) -> tuple[Tensor, Tensor | None, Batch]:
    """No border: the next module is where this one was."""
    return x, pending_residual, batch


class DeviceTransfer:
    """A border: the stream and the batch move to another device, once for all modules behind it.

    A GPU becomes the current one: that is where kernels are started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None, Batch]:
        """Everything on this device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return (
            x.to(self.device),
            None if pending_residual is None else pending_residual.to(self.device),
            batch.to(self.device),
        )
