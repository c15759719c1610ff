"""The cache users hold: geometry first, tensors when the devices are known.

A contiguous cache is a paged one whose table is the identity: row `b` owns the pages from b · width on. So a
plain `Model.forward(ids, cache)` and a generator that deals pages out share one attention path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..errors import InputError, NotLoaded
from .dense import DenseLayer

PAGE = 256
"""Tokens in a page."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for each token."""

    kv_heads: int
    head_dim: int


class Cached(Protocol):
    """What a cache must know of a model."""

    @property
    def cache_shapes(self) -> Sequence[LayerShape]:
        """One for each layer."""
        ...

    @property
    def cache_devices(self) -> Sequence[torch.device] | None:
        """Where each layer is; None while the model is not loaded."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision keys and values arrive in."""
        ...

    @property
    def cache_length(self) -> int:
        """The configured sequence length."""
        ...


class CacheBase:
    """Keys and values of `batch_size` rows of up to `max_seq_len` tokens, of one precision or another."""

    def __init__(
        self,
        model: Cached,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: Self | None = None,
        lazy: bool = False,
    ) -> None:
        if lazy and copy_from is not None:
            raise InputError("A lazy cache has no tensors to copy into: use lazy=False with copy_from.")
        if batch_size < 1 or max_seq_len == 0 or max_seq_len < -1:
            raise InputError(
                f"A cache needs batch_size of at least 1 and max_seq_len of at least 1 (or -1: the model's "
                f"own), found {batch_size} and {max_seq_len}."
            )
        self.model = model
        self.batch_size = batch_size
        self.max_seq_len = model.cache_length if max_seq_len == -1 else max_seq_len
        self.shapes = tuple(model.cache_shapes)
        self.current_seq_len = 0
        self._layers: list[DenseLayer] | None = None
        if not lazy:
            self.allocate()
        if copy_from is not None:
            self._copy_all(copy_from)

    @property
    def width(self) -> int:
        """Pages of one row."""
        return -(-self.max_seq_len // PAGE)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.width * self.batch_size

    @property
    def allocated(self) -> bool:
        """Whether the tensors exist."""
        return self._layers is not None

    @property
    def layers(self) -> list[DenseLayer]:
        """One for each layer of the model."""
        if self._layers is None:
            raise NotLoaded(
                "This cache was made with lazy=True and has no tensors yet: pass it to "
                "model.load_autosplit(cache), or call cache.allocate() after model.load()."
            )
        return self._layers

    def allocate(self) -> None:
        """Make the tensors, each beside its layer's weights."""
        devices = self.model.cache_devices
        if devices is None:
            raise NotLoaded(
                "A cache is placed beside the model's layers, which are not loaded yet: call model.load() "
                "first, or make the cache with lazy=True and pass it to model.load_autosplit(cache)."
            )
        self._layers = [self._layer(shape, where) for shape, where in zip(self.shapes, devices, strict=True)]

    def table(self, rows: int, device: torch.device) -> Tensor:
        """(rows, width) the identity: row b owns its own stretch of pages."""
        return torch.arange(rows * self.width, device=device).view(rows, self.width)

    def reset(self) -> None:
        """Forget the sequence; the tensors stay."""
        self.current_seq_len = 0

    def all_tensors(self) -> list[Tensor]:
        """Every tensor that holds state."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    def footprint(self) -> list[int]:
        """Bytes on each device, in the order the devices appear."""
        sums: dict[torch.device, int] = {}
        for tensor in self.all_tensors():
            sums[tensor.device] = sums.get(tensor.device, 0) + tensor.nbytes
        return list(sums.values())

    def clone(self) -> Self:
        """A deep copy."""
        return type(self)(self.model, self.batch_size, self.max_seq_len, copy_from=self)

    def copy_states(
        self,
        target: Self,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy the tokens of one row to one or more rows of another cache (or of this one)."""
        self._check_copy(target, from_column, from_columns, to_column, to_columns, from_row, from_rows)
        if to_row < 0 or to_rows < 1 or to_row + to_rows > target.batch_size:
            raise InputError(
                f"Rows {to_row} to {to_row + to_rows} are not in a cache of {target.batch_size}."
            )
        for source, goal in zip(self.all_tensors(), target.all_tensors(), strict=True):
            taken = _rows(source, self.batch_size)[from_row, from_column : from_column + from_columns].clone()
            _rows(goal, target.batch_size)[to_row : to_row + to_rows, to_column : to_column + to_columns] = (
                taken
            )

    def _check_copy(
        self,
        target: Self,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        row: int,
        rows: int,
    ) -> None:
        if type(target) is not type(self) or target.shapes != self.shapes:
            raise InputError("copy_states needs two caches of the same kind and of the same model.")
        if rows != 1 or not 0 <= row < self.batch_size:
            raise InputError(
                f"copy_states reads one row that exists, found from_row={row}, from_rows={rows}."
            )
        if from_columns != to_columns or from_columns < 0 or from_column < 0 or to_column < 0:
            raise InputError(
                f"copy_states needs equal ranges, found {from_columns} and {to_columns} columns."
            )
        if from_column + from_columns > self.max_seq_len or to_column + to_columns > target.max_seq_len:
            raise InputError(
                f"copy_states reaches column {max(from_column, to_column) + from_columns}, beyond "
                f"max_seq_len {self.max_seq_len} or {target.max_seq_len}."
            )

    def _copy_all(self, other: Self) -> None:
        rows, columns = min(self.batch_size, other.batch_size), min(self.max_seq_len, other.max_seq_len)
        for row in range(rows):
            other.copy_states(self, 0, columns, 0, columns, row, 1, row, 1)
        self.current_seq_len = min(other.current_seq_len, columns)

    def _layer(self, shape: LayerShape, device: torch.device) -> DenseLayer:
        return DenseLayer(
            self.num_pages, PAGE, shape.kv_heads, shape.head_dim, self.model.cache_dtype, device
        )


class Cache(CacheBase):
    """Keys and values in the model's own precision: float16 or bfloat16 on a GPU, float32 on a CPU."""

    @property
    def key_states(self) -> list[Tensor]:
        """For each layer a view, (batch, capacity, kv_heads, head_dim); the capacity is whole pages."""
        return [_rows(layer.k, self.batch_size) for layer in self.layers]

    @property
    def value_states(self) -> list[Tensor]:
        """Like `key_states`."""
        return [_rows(layer.v, self.batch_size) for layer in self.layers]


def _rows(tensor: Tensor, batch: int) -> Tensor:
    """Pages as contiguous rows: (batch, tokens, …)."""
    return tensor.view(batch, -1, *tensor.shape[2:])
