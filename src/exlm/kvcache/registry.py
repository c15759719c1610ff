"""Cache classes by name."""

from __future__ import annotations

from collections.abc import Mapping

from .base import CacheBase
from .dense import Cache, CacheFP16
from .quantized import CacheFP8, CacheQ4, CacheQ6, CacheQ8

CACHES: Mapping[str, type[CacheBase]] = {
    "fp16": CacheFP16,
    "q8": CacheQ8,
    "q6": CacheQ6,
    "q4": CacheQ4,
    "fp8": CacheFP8,
}
"""Values of `cache_type` and `--cache`."""

CACHE_CLASSES: Mapping[str, type[CacheBase]] = {
    "Cache": Cache,
    **{cache_class.__name__: cache_class for cache_class in CACHES.values()},
}
"""Classes by class name, by which rank 0 tells workers what to allocate."""
