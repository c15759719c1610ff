"""The names that scripts written for exllamav2 import, each one an exlm class. Nothing is defined here."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import CacheFP8 as ExLlamaV2Cache_8bit
from exlm import CacheQ4 as ExLlamaV2Cache_Q4
from exlm import CacheQ6 as ExLlamaV2Cache_Q6
from exlm import CacheQ8 as ExLlamaV2Cache_Q8
from exlm import Config as ExLlamaV2Config
from exlm import Model as ExLlamaV2
from exlm import Tokenizer as ExLlamaV2Tokenizer
from exlm import __version__

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Config",
    "ExLlamaV2Tokenizer",
    "__version__",
]
