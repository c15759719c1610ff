"""The KV cache: keys and values of all layers in pages on the devices, as floats or quantised.

A cache takes a model's layer shapes and devices, gives each layer's pages to attention kernels, and copies
pages for the generator, which decides which sequence has which page. `model`, `generator`, `parallel` and `legacy`
import it.
"""

from collections.abc import Mapping

from .base import PAGE_SIZE, CacheBase, CacheLayer, CacheReplicator, LayerShape
from .dense import Cache, CacheFP16, DenseLayer, NoCache
from .quantized import CacheFP8, CacheQ4, CacheQ6, CacheQ8, QuantizedLayer

__all__ = [
    "CACHES",
    "PAGE_SIZE",
    "Cache",
    "CacheBase",
    "CacheFP8",
    "CacheFP16",
    "CacheLayer",
    "CacheQ4",
    "CacheQ6",
    "CacheQ8",
    "CacheReplicator",
    "DenseLayer",
    "LayerShape",
    "NoCache",
    "QuantizedLayer",
]

CACHES: Mapping[str, type[CacheBase]] = {
    "fp16": CacheFP16,
    "q8": CacheQ8,
    "q6": CacheQ6,
    "q4": CacheQ4,
    "fp8": CacheFP8,
}
"""Values of `cache_type` and `--cache`."""
