"""For `from exllamav2.model import …`, where scripts also find what that module used."""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import Config as ExLlamaV2Config
from exlm import Lora as ExLlamaV2Lora
from exlm import Model as ExLlamaV2
from exlm.legacy.devices import torch_device as _torch_device
from exlm.legacy.placeholders import MLP as ExLlamaV2MLP
from exlm.legacy.placeholders import AttentionModule as ExLlamaV2Attention
from exlm.legacy.placeholders import EmbeddingModule as ExLlamaV2Embedding
from exlm.legacy.placeholders import LayerModule as ExLlamaV2Module
from exlm.legacy.placeholders import LayerNorm as ExLlamaV2LayerNorm
from exlm.legacy.placeholders import Linear as ExLlamaV2Linear
from exlm.legacy.placeholders import MoEMLP as ExLlamaV2MoEMLP
from exlm.legacy.placeholders import ParallelDecoder as ExLlamaV2ParallelDecoder
from exlm.legacy.placeholders import PositionEmbedding as ExLlamaV2PosEmbedding
from exlm.legacy.placeholders import RMSNorm as ExLlamaV2RMSNorm

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Attention",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Config",
    "ExLlamaV2Embedding",
    "ExLlamaV2LayerNorm",
    "ExLlamaV2Linear",
    "ExLlamaV2Lora",
    "ExLlamaV2MLP",
    "ExLlamaV2MoEMLP",
    "ExLlamaV2Module",
    "ExLlamaV2ParallelDecoder",
    "ExLlamaV2PosEmbedding",
    "ExLlamaV2RMSNorm",
    "_torch_device",
]
