"""The caches of fewer bits: which coder each one gives its keys and its values."""

from __future__ import annotations

from typing import ClassVar

import torch

from .base import CacheBase
from .coded import CodedLayer, Coder, Rotated, Truncated
from .hadamard import GROUP
from .layer import PAGE, LayerShape


class CodedCache(CacheBase):
    """A cache of bytes. New tokens are encoded when a call writes them; old ones are never encoded again."""

    key: ClassVar[Coder]
    value: ClassVar[Coder]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored codes."""
        return torch.uint8

    def _layer(self, shape: LayerShape, device: torch.device) -> CodedLayer:
        return CodedLayer(self.num_pages, PAGE, shape, self.key, self.value, device)


class RotatedCache(CodedCache):
    """A cache of rotated codes, with a float16 scale for each 32 of them."""

    has_scales = True
    group = GROUP


class CacheQ8(RotatedCache):
    """Keys and values in 8 bits: 8.5 with the scales."""

    key = Rotated(8)
    value = Rotated(8)


class CacheQ6(RotatedCache):
    """Keys in 8 bits and values in 4: 6.5 on average with the scales."""

    key = Rotated(8)
    value = Rotated(4)


class CacheQ4(RotatedCache):
    """Keys and values in 4 bits: 4.5 with the scales."""

    key = Rotated(4)
    value = Rotated(4)


class CacheFP8(CodedCache):
    """Keys and values as the upper byte of a float16, without scales. Q8 is far more exact at 8.5 bits."""

    key = Truncated()
    value = Truncated()
