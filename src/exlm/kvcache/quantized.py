"""The caches of fewer bits: which coder each one gives its keys and its values."""

from __future__ import annotations

from typing import ClassVar

import torch

from .base import CacheBase
from .hadamard import GROUP_SIZE
from .layer import PAGE_SIZE, LayerShape
from .quantized_layer import HadamardQuantizer, KVQuantizer, QuantizedLayer, TruncatedFP8


class QuantizedCache(CacheBase):
    """A cache of bytes. New tokens are encoded when a call writes them; old ones are never encoded again."""

    key_quantizer: ClassVar[KVQuantizer]
    value_quantizer: ClassVar[KVQuantizer]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored codes."""
        return torch.uint8

    def _make_layer(self, shape: LayerShape, device: torch.device) -> QuantizedLayer:
        return QuantizedLayer(
            self.num_pages, PAGE_SIZE, shape, self.key_quantizer, self.value_quantizer, device
        )


class HadamardCache(QuantizedCache):
    """A cache of rotated codes, with a float16 scale for each 32 of them."""

    has_scales = True
    group_size = GROUP_SIZE


class CacheQ8(HadamardCache):
    """Keys and values in 8 bits: 8.5 with the scales."""

    key_quantizer = HadamardQuantizer(8)
    value_quantizer = HadamardQuantizer(8)


class CacheQ6(HadamardCache):
    """Keys in 8 bits and values in 4: 6.5 on average with the scales."""

    key_quantizer = HadamardQuantizer(8)
    value_quantizer = HadamardQuantizer(4)


class CacheQ4(HadamardCache):
    """Keys and values in 4 bits: 4.5 with the scales."""

    key_quantizer = HadamardQuantizer(4)
    value_quantizer = HadamardQuantizer(4)


class CacheFP8(QuantizedCache):
    """Keys and values as the upper byte of a float16, without scales. Q8 is far more exact at 8.5 bits."""

    key_quantizer = TruncatedFP8()
    value_quantizer = TruncatedFP8()
