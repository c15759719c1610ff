"""Caches of floats, and the forward pass without a cache."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.interface import AttnMetadata, KVPages
from .base import PAGE_SIZE, CacheBase, CacheLayer, CacheOwner, LayerShape, empty_pages, slot_mapping
from .hadamard import to_float16_saturating

FLOAT_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class DenseLayer(CacheLayer):
    """A layer's pages as floats: (pages, page size, kv_heads, head_dim) keys and values."""

    def __init__(
        self, pages: int, page_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (pages, page_size, heads, head_dim)
        keys, values = empty_pages(size, dtype, device), empty_pages(size, dtype, device)
        super().__init__(KVPages(page_size, (keys,), (values,), ("float", "float")))

    @property
    def k(self) -> Tensor:
        """The keys' pages."""
        return self.keys[0]

    @property
    def v(self) -> Tensor:
        """The values' pages."""
        return self.values[0]

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Append the new heads to each row's past; return all heads up to max_kv_len.

        New tokens are read back as stored, so outputs do not depend on a prompt's chunks. Numbers beyond
        float16's range saturate.
        """
        slots = slot_mapping(metadata, k.shape[1], self.page_size)
        self.k.flatten(0, 1)[slots] = _to_storage_dtype(k.flatten(0, 1), self.k.dtype)
        self.v.flatten(0, 1)[slots] = _to_storage_dtype(v.flatten(0, 1), self.v.dtype)
        max_pages = -(-metadata.max_kv_len // self.page_size)
        table = metadata.page_table[:, :max_pages].long()
        keys = self.k[table].flatten(1, 2)[:, : metadata.max_kv_len]  # (rows, max_kv_len, kv_heads, head_dim)
        values = self.v[table].flatten(1, 2)[:, : metadata.max_kv_len]
        return keys.to(k.dtype), values.to(v.dtype)


class Cache(CacheBase):
    """Keys and values as floats: the model's own precision, or `dtype` ("float16", "bfloat16", "float32").

    The model's own is float16 or bfloat16 on a GPU and float32 on a CPU.
    """

    def __init__(
        self,
        model: CacheOwner,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: Self | None = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: int | str | torch.device | None = None,
        *,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        self._dtype = None if dtype is None else _parse_dtype(dtype)
        super().__init__(model, batch_size, max_seq_len, copy_from, lazy, num_key_value_heads, fixed_device)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the stored numbers."""
        return self._dtype or self.model.cache_dtype

    def _make_layer(self, shape: LayerShape, device: torch.device) -> DenseLayer:
        return DenseLayer(self.num_pages, PAGE_SIZE, shape.kv_heads, shape.head_dim, self.dtype, device)


class CacheFP16(Cache):
    """Keys and values in 16 bits: the model's own float16 or bfloat16, else float16.

    A CPU, which computes in float32, stores float16 as a GPU does: a step reads half as much.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the stored numbers."""
        model_dtype = super().dtype
        return torch.float16 if model_dtype is torch.float32 else model_dtype


class NoCache:
    """A layer without a cache: attention over the new tokens only."""

    kv_pages = None
    state = None

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Return the new heads unchanged."""
        return k, v


def _to_storage_dtype(heads: Tensor, dtype: torch.dtype) -> Tensor:
    saturates = dtype is torch.float16 and heads.dtype is not dtype
    return to_float16_saturating(heads) if saturates else heads.to(dtype)


def _parse_dtype(requested: str | torch.dtype) -> torch.dtype:
    name = str(requested).removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        raise InputError(
            f"A cache's dtype must be one of {', '.join(FLOAT_DTYPES)}, found {name!r}. For fewer bits use "
            "CacheQ8, CacheQ6, CacheQ4 or CacheFP8."
        )
    return FLOAT_DTYPES[name]
