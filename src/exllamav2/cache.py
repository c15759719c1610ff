"""For `from exllamav2.cache import …`."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import CacheFP8 as ExLlamaV2Cache_8bit
from exlm import CacheQ4 as ExLlamaV2Cache_Q4
from exlm import CacheQ6 as ExLlamaV2Cache_Q6
from exlm import CacheQ8 as ExLlamaV2Cache_Q8
from exlm.legacy.devices import cache_tp as ExLlamaV2Cache_TP

__all__ = [
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
]
