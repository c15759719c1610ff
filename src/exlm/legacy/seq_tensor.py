"""A tensor that grows along one dimension. The house itself keeps ids in lists; this is for scripts that keep
sequences the way the old library did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from .. import InputError

FIRST_CAPACITY = 256


class SeqTensor:
    """Storage with room to grow, of which the first `len(self)` entries along `seq_dim` are in use.

    What `shape` says along `seq_dim` does not matter: a new one is empty. Appending copies what is there only
    when the room is used up, and then the room doubles.
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
        room = list(shape)
        room[self.seq_dim] = FIRST_CAPACITY if init_cap < 0 else init_cap
        self._storage = torch.empty(room, dtype=dtype, device=device)
        self._used = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor, seq_dim: int) -> Self:
        """One that holds a copy of a tensor."""
        made = cls(tensor.shape, tensor.dtype, seq_dim, tensor.device, tensor.shape[seq_dim])
        made.append(tensor)
        return made

    def __len__(self) -> int:
        """Entries in use."""
        return self._used

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._used > 0

    @property
    def capacity(self) -> int:
        """Entries there is room for."""
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
        """Put a copy of these entries at the end; None is nothing."""
        if new is None:
            return
        added = new.torch() if isinstance(new, SeqTensor) else new
        self._check(added)
        count = added.shape[self.seq_dim]
        self._make_room(self._used + count)
        self._storage.narrow(self.seq_dim, self._used, count).copy_(added)
        self._used += count

    def truncate(self, new_len: int) -> None:
        """Keep only the first entries."""
        if not 0 <= new_len <= self._used:
            raise InputError(f"Cannot truncate {self._used} entries to {new_len}.")
        self._used = new_len

    def clear(self) -> None:
        """Forget every entry; the room stays."""
        self._used = 0

    def set(self, new: Tensor | SeqTensor | None = None) -> None:
        """Hold a copy of these entries instead."""
        kept = new.torch().clone() if isinstance(new, SeqTensor) else new
        self.clear()
        self.append(kept)

    def clone(self, drop: int | None = None) -> SeqTensor:
        """Another one with the same entries, less the last `drop`."""
        kept = self._used - (drop or 0)
        if not 0 <= kept <= self._used:
            raise InputError(f"Cannot drop {drop} of {self._used} entries.")
        return SeqTensor.from_tensor(self.torch_slice(0, kept), self.seq_dim)

    def _make_room(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        room = list(self._storage.shape)
        room[self.seq_dim] = max(needed, 2 * self.capacity)
        wider = self._storage.new_empty(room)
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
