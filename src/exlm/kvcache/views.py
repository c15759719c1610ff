"""What a cache shows of its tensors: a list of views, one for each layer, into which may be written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError


class LayerViews(list[Tensor]):
    """Views of what each layer stores, (batch, tokens, …). A tensor assigned to one is copied into it.

    It may have fewer tokens than the layer has room for, as one that was saved before.
    """

    @torch.no_grad()
    def __setitem__(self, index: Any, value: Any) -> None:
        """Store a tensor in place of what the layer holds; or several, for a slice."""
        if isinstance(index, slice):
            for one, tensor in zip(range(*index.indices(len(self))), value, strict=True):
                self[one] = tensor
            return
        view = self[index]
        fits = isinstance(value, Tensor) and value.dim() == view.dim() and value.shape[1] <= view.shape[1]
        if not fits or (value.shape[0], *value.shape[2:]) != (view.shape[0], *view.shape[2:]):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"Layer {index} of this cache stores {tuple(view.shape)}, or fewer tokens; found {found}."
            )
        view[:, : value.shape[1]].copy_(value)
