"""The kinds of caches by name."""

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
"""What `cache_type` and `--cache` may be."""

CACHE_CLASSES: Mapping[str, type[CacheBase]] = {
    "Cache": Cache,
    **{cache_class.__name__: cache_class for cache_class in CACHES.values()},
}
"""Every class by its name, which is how rank 0 tells the other ranks what to allocate."""
