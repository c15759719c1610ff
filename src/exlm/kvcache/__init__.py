"""Where keys and values live: tensors on devices, in pages known only by number."""

from .base import CacheBase, CacheReplicator
from .dense import Cache, CacheFP16, DenseLayer, NoCache
from .layer import PAGE_SIZE, CacheLayer, LayerShape
from .quantized import CacheFP8, CacheQ4, CacheQ6, CacheQ8, QuantizedLayer
from .registry import CACHES

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
