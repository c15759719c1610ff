"""The kinds of caches by the names that calls and commands know them by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .base import CacheBase
from .dense import CacheFP16
from .quantized import CacheFP8, CacheQ4, CacheQ6, CacheQ8


class CacheRegistry(Mapping[str, type[CacheBase]]):
    """Kinds of caches by name: what `cache_type` and `--cache` may be."""

    def __init__(self, **kinds: type[CacheBase]) -> None:
        self._kinds = kinds

    def __getitem__(self, name: str) -> type[CacheBase]:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


CACHES = CacheRegistry(fp16=CacheFP16, q8=CacheQ8, q6=CacheQ6, q4=CacheQ4, fp8=CacheFP8)
