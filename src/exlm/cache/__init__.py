"""Where keys and values live: tensors on devices, in pages known only by number."""

from .base import CacheBase
from .coded import CodedLayer
from .dense import Cache, CacheFP16, DenseLayer, Passing
from .kinds import CACHES
from .layer import PAGE, Layer, LayerShape
from .owner import Mirror
from .quant import CacheFP8, CacheQ4, CacheQ6, CacheQ8

__all__ = [
    "CACHES",
    "PAGE",
    "Cache",
    "CacheBase",
    "CacheFP8",
    "CacheFP16",
    "CacheQ4",
    "CacheQ6",
    "CacheQ8",
    "CodedLayer",
    "DenseLayer",
    "Layer",
    "LayerShape",
    "Mirror",
    "Passing",
]
