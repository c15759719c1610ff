"""For `from exllamav2.cache import …`."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase

__all__ = ["ExLlamaV2Cache", "ExLlamaV2CacheBase"]
