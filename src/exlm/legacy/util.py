"""Helpers of `exllamav2.util` and `.compat` that scripts use in their own code; exlm uses none of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise as pairwise
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress


INITIAL_CAPACITY = 256


class SeqTensor:
    """A tensor that grows along `seq_dim`; the first `len(self)` entries of its storage are in use.

    A new one is empty: the size of `shape` along `seq_dim` is ignored. An append beyond the capacity at
    least doubles it and copies the entries.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        seq_dim: int,
        device: torch.device | str | int = "cpu",
        init_cap: int = -1,
    ) -> None:
        if not -len(shape) <= seq_dim < len(shape):
            raise InputError(f"seq_dim {seq_dim} is not a dimension of the shape {tuple(shape)}.")
        self.seq_dim = seq_dim % len(shape)
        capacity = list(shape)
        capacity[self.seq_dim] = INITIAL_CAPACITY if init_cap < 0 else init_cap
        self._storage = torch.empty(capacity, dtype=dtype, device=device)
        self._used = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor, seq_dim: int) -> Self:
        """A new one that holds a copy of a tensor."""
        made = cls(tensor.shape, tensor.dtype, seq_dim, tensor.device, tensor.shape[seq_dim])
        made.append(tensor)
        return made

    def __len__(self) -> int:
        """The number of entries in use."""
        return self._used

    def __bool__(self) -> bool:
        """Whether any entry is in use."""
        return self._used > 0

    @property
    def capacity(self) -> int:
        """The number of entries that fit without growing."""
        return self._storage.shape[self.seq_dim]

    def torch(self) -> Tensor:
        """A view of everything in use."""
        return self.torch_slice(None, None)

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        """A view of entries a to b; negative ones count from the end, as in Python."""
        start, stop, _ = slice(a, b).indices(self._used)
        return self._storage.narrow(self.seq_dim, start, max(0, stop - start))

    def slice(self, a: int | None, b: int | None) -> Tensor:
        """A copy of entries a to b."""
        return self.torch_slice(a, b).clone()

    def append(self, new: Tensor | SeqTensor | None) -> None:
        """Append a copy of these entries; None appends nothing."""
        if new is None:
            return
        added = new.torch() if isinstance(new, SeqTensor) else new
        self._check(added)
        count = added.shape[self.seq_dim]
        self._reserve(self._used + count)
        self._storage.narrow(self.seq_dim, self._used, count).copy_(added)
        self._used += count

    def truncate(self, new_len: int) -> None:
        """Keep only the first entries."""
        if not 0 <= new_len <= self._used:
            raise InputError(f"Cannot truncate {self._used} entries to {new_len}.")
        self._used = new_len

    def clear(self) -> None:
        """Drop all entries and keep the capacity."""
        self._used = 0

    def set(self, new: Tensor | SeqTensor | None = None) -> None:
        """Replace all entries by a copy of these."""
        kept = new.torch().clone() if isinstance(new, SeqTensor) else new
        self.clear()
        self.append(kept)

    def clone(self, drop: int | None = None) -> SeqTensor:
        """A copy without the last `drop` entries."""
        kept = self._used - (drop or 0)
        if not 0 <= kept <= self._used:
            raise InputError(f"Cannot drop {drop} of {self._used} entries.")
        return SeqTensor.from_tensor(self.torch_slice(0, kept), self.seq_dim)

    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        size = list(self._storage.shape)
        size[self.seq_dim] = max(needed, 2 * self.capacity)
        wider = self._storage.new_empty(size)
        wider.narrow(self.seq_dim, 0, self._used).copy_(self.torch())
        self._storage = wider

    def _check(self, added: Tensor) -> None:
        expected, found = list(self._storage.shape), list(added.shape)
        if len(found) == len(expected):
            expected[self.seq_dim] = found[self.seq_dim]
        if found != expected or added.dtype != self._storage.dtype:
            raise InputError(
                f"Expected {self._storage.dtype} of shape {tuple(expected)}, free only along dimension "
                f"{self.seq_dim}; found {added.dtype} of shape {tuple(found)}."
            )


class Timer:
    """Times a block: `with Timer() as t: …`, then `t.interval` in seconds."""

    start_time: float = 0.0
    end_time: float = 0.0
    interval: float = 0.0

    def __enter__(self) -> Self:
        """Start the clock."""
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the clock, also after an exception."""
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time


def get_basic_progress() -> Progress:
    """A progress bar of rich: `with get_basic_progress() as bar: task = bar.add_task("Jobs", total=9)`."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(None), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
