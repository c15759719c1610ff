"""One layer's pages, whatever they are written in: what a cache may ask of them, and where a token goes.

How numbers are stored is the business of `dense` and `coded`; which page is whose is decided elsewhere.
"""

from __future__ import annotations

import copy
import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..errors import DoesNotFit
from ..kernels.interface import AttnMetadata, KVCacheDtype, KVPages
from ..memory import ran_out

PAGE_SIZE = 256
"""Tokens in a page."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for each token."""

    kv_heads: int
    head_dim: int


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pages of zeros. A processor's take memory when tokens come: few caches are ever full."""
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)
    except (OSError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not ran_out(error):
            raise
        raise DoesNotFit(
            f"{shape[0] * shape[1]:,} tokens do not fit this memory: the keys of one layer take {size:,} "
            "bytes. Ask for fewer tokens (max_seq_len, batch_size) or fewer bits (CacheQ8, CacheQ4)."
        ) from error


class CacheLayer(ABC):
    """The keys and values of one layer, in tensors of (pages, page size, kv_heads, …).

    `keys` and `values` hold the stored numbers first, then their scales where there are any. What is stored
    for a token depends on that token alone, so tokens and pages may be copied as they are.
    """

    kv_dtype: tuple[KVCacheDtype, KVCacheDtype]  # of keys and of values

    def __init__(self, page_size: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        self.page_size = page_size
        self.keys = keys
        self.values = values
        self._paged: KVPages | None = None

    @property
    def paged(self) -> KVPages:
        """The pages, for kernels that read and write in place."""
        found = self._paged
        if found is None or found.keys is not self.keys or found.values is not self.values:
            self._paged = found = KVPages(self.page_size, self.keys, self.values, self.kv_dtype)
        return found

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that holds state."""
        return self.keys + self.values

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.keys[0].device

    @abstractmethod
    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Write the new heads behind each row's past; return every head up to the longest row's end.

        Heads are (rows, tokens, kv_heads, head_dim). Behind a shorter row's end anything may stand.
        """

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Duplicate the first tokens of one page in another."""
        if source != target:
            for tensor in self.tensors:
                tensor[target, :tokens] = tensor[source, :tokens]

    def move(self, device: torch.device) -> None:
        """Take the pages to a device, unless they are there."""
        self.keys = tuple(tensor.to(device) for tensor in self.keys)
        self.values = tuple(tensor.to(device) for tensor in self.values)

    def clone(self) -> Self:
        """The same numbers in tensors of its own."""
        twin = copy.copy(self)
        twin.keys = tuple(tensor.clone() for tensor in self.keys)
        twin.values = tuple(tensor.clone() for tensor in self.values)
        return twin


def new_token_positions(metadata: AttnMetadata, tokens: int) -> Tensor:
    """(rows, tokens) the place of each new token in its own row."""
    return metadata.past_lens[:, None] + torch.arange(tokens, device=metadata.past_lens.device)


def slot_mapping(metadata: AttnMetadata, tokens: int, page_size: int) -> Tensor:
    """(rows · tokens,) the place of each new token among all pages laid end to end."""
    positions = new_token_positions(metadata, tokens)
    return (
        metadata.pages.gather(1, positions // page_size).long() * page_size + positions % page_size
    ).flatten()
