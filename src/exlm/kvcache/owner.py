"""What a cache must know of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .layer import LayerShape

if TYPE_CHECKING:
    from .base import CacheBase


class CacheReplicator(Protocol):
    """Who repeats what is done to a cache in the processes that keep its other heads."""

    def replicate_allocation(self, cache: CacheBase) -> None:
        """It has tensors now."""
        ...

    def replicate_clone(self, cache: CacheBase, twin: CacheBase) -> None:
        """The twin is a copy of it."""
        ...

    def replicate_call(
        self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None
    ) -> None:
        """This method was called, with these values."""
        ...


class CacheOwner(Protocol):
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
    def cache_max_seq_len(self) -> int:
        """The configured sequence length."""
        ...

    @property
    def cache_replicator(self) -> CacheReplicator | None:
        """Who must be told what is done to a cache; None: nobody."""
        ...
