"""Keys and values kept as plain floats, in pages; and the case of no cache at all."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.backend import Where


class DenseLayer:
    """One layer's pages: (pages, page size, kv_heads, head_dim) for keys and for values."""

    def __init__(
        self, pages: int, page: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page = page
        self.k = torch.zeros(pages, page, heads, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.k.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that holds state."""
        return (self.k, self.v)

    def update(self, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Write the new heads behind each row's past; return every head up to the longest row's end."""
        slots = where.past[:, None] + torch.arange(k.shape[1], device=k.device)  # (rows, tokens)
        home = where.pages.gather(1, slots // self.page).long() * self.page + slots % self.page
        flat = home.flatten()
        self.k.flatten(0, 1)[flat] = k.flatten(0, 1).to(self.k.dtype)
        self.v.flatten(0, 1)[flat] = v.flatten(0, 1).to(self.v.dtype)
        width = -(-where.longest // self.page)
        table = where.pages[:, :width].long()
        keys = self.k[table].flatten(1, 2)[:, : where.longest]  # (rows, longest, kv_heads, head_dim)
        values = self.v[table].flatten(1, 2)[:, : where.longest]
        return keys.to(k.dtype), values.to(v.dtype)


class Passing:
    """No cache: what comes in is all there is."""

    def update(self, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Return the new heads unchanged."""
        return k, v
