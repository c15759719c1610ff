"""Where keys and values live: tensors on devices, in pages known only by number."""

from .cache import PAGE, Cache, CacheBase, LayerShape
from .dense import DenseLayer, Passing

__all__ = ["PAGE", "Cache", "CacheBase", "DenseLayer", "LayerShape", "Passing"]
