"""`CacheLayer`: one layer's pages in any format and its recurrent states, and the slots that new tokens are written to.

`dense` and `quantized` implement it; the generator's page table decides which page belongs to which sequence.
`CacheBase._make_layer` chooses a layer's kind from its shape.
"""

from __future__ import annotations

import copy
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..errors import DoesNotFit
from ..kernels.interface import AttnMetadata, KVPages, RecurrentState
from ..memory import ran_out
from ..spec import StateShape

PAGE_SIZE = 256
"""Tokens in a page."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps: KV heads (0 without attention) of `head_dim`, and a recurrent state."""

    kv_heads: int
    head_dim: int
    state: StateShape | None = None


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pages of zeros, which take memory as `lazy_zeros` do."""
    return lazy_zeros(
        shape,
        dtype,
        device,
        f"{shape[0] * shape[1]:,} tokens do not fit this memory: the keys of one layer take "
        f"{math.prod(shape) * dtype.itemsize:,} bytes. Ask for fewer tokens (max_seq_len, batch_size) or fewer bits "
        "(CacheQ8, CacheQ4).",
    )


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, problem: str) -> Tensor:
    """Zeros. On a CPU they take no memory until they are written to: few caches are ever full.

    `problem` is the message of the error if they do not fit.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)
    except (OSError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not ran_out(error):
            raise
        raise DoesNotFit(problem) from error


class CacheLayer(ABC):
    """What a cache stores of one layer: keys and values in pages, (pages, page size, kv_heads, …).

    What is stored for a token depends on that token alone, so tokens and pages may be copied as they are.
    """

    def __init__(self, kv_pages: KVPages) -> None:
        self.kv_pages = kv_pages
        self.state: RecurrentState | None = None
        """The recurrent states of the layer, one in each slot; they do not move with pages."""

    def allocate_state(self, shape: StateShape, slots: int, conv_dtype: torch.dtype) -> None:
        """Make room for that many recurrent states; what the slots hold is undefined until it is written."""
        problem = (
            f"{slots:,} recurrent states do not fit this memory: those of one layer take "
            f"{slots * shape.nbytes(conv_dtype.itemsize):,} bytes. Ask for fewer: a smaller batch_size of the cache, "
            "or a smaller max_batch_size or state_cache_bytes of the generator."
        )
        conv = lazy_zeros((slots, *shape.conv), conv_dtype, self.device, problem)
        matrix = None
        if shape.matrix is not None:
            matrix = lazy_zeros((slots, *shape.matrix), torch.float32, self.device, problem)
        self.state = RecurrentState(conv, matrix)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv_pages.page_size

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The stored keys, then their scales if they have any."""
        return self.kv_pages.keys

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The stored values, then their scales if they have any."""
        return self.kv_pages.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the pages."""
        return self.keys + self.values

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the recurrent states."""
        return () if self.state is None else tuple(tensor for tensor in self.state if tensor is not None)

    @property
    def device(self) -> torch.device:
        """The pages' device."""
        return self.keys[0].device

    @abstractmethod
    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Append the new heads to each row's past; return all heads up to max_kv_len.

        Heads are (rows, tokens, kv_heads, head_dim). Past the end of a shorter row they are undefined.
        """

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a page to another."""
        if source != target:
            for tensor in self.tensors:
                tensor[target, :tokens] = tensor[source, :tokens]

    def roll_left(self, rows: int) -> None:
        """Drop the first token of each row; the pages of a row are consecutive."""
        for tensor in self.tensors:
            tokens = as_rows(tensor, rows)
            tokens.copy_(tokens.roll(-1, 1))

    def move(self, device: torch.device) -> None:
        """Move the pages to a device."""
        self._replace(lambda tensor: tensor.to(device))

    def clone(self) -> Self:
        """A copy with tensors of its own."""
        clone = copy.copy(self)
        clone._replace(Tensor.clone)
        return clone

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        pages = self.kv_pages
        keys, values = tuple(map(change, pages.keys)), tuple(map(change, pages.values))
        self.kv_pages = KVPages(pages.page_size, keys, values, pages.dtypes)
        if self.state is not None:
            conv, matrix = self.state
            self.state = RecurrentState(change(conv), None if matrix is None else change(matrix))


def as_rows(tensor: Tensor, rows: int) -> Tensor:
    """A view of the pages as contiguous rows, (rows, tokens, …)."""
    return tensor.view(rows, -1, *tensor.shape[2:])


def new_token_positions(metadata: AttnMetadata, tokens: int) -> Tensor:
    """(rows, tokens) the index of each new token in its row."""
    return metadata.past_lens[:, None] + torch.arange(tokens, device=metadata.past_lens.device)


def slot_mapping(metadata: AttnMetadata, tokens: int, page_size: int) -> Tensor:
    """(rows · tokens,) the slot of each new token: its index in the flattened pages."""
    positions = new_token_positions(metadata, tokens)
    return (metadata.page_table.gather(1, positions // page_size).long() * page_size + positions % page_size).flatten()
