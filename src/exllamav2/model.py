"""For `from exllamav2.model import …`, where scripts also find what that module used."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import Config as ExLlamaV2Config
from exlm import Lora as ExLlamaV2Lora
from exlm import Model as ExLlamaV2
from exlm.legacy.moving import torch_device as _torch_device

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "_torch_device",
]
