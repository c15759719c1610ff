"""The names that scripts written for exllamav2 import, each one an exlm class. Nothing is defined here."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import Config as ExLlamaV2Config
from exlm import Model as ExLlamaV2
from exlm import Tokenizer as ExLlamaV2Tokenizer
from exlm import __version__

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Config",
    "ExLlamaV2Tokenizer",
    "__version__",
]
