"""The names that scripts written for exllamav2 import, each one an exlm class. Nothing is defined here.

Its modules are there without being imported, as they were: `import exllamav2; exllamav2.util.…`.
"""

from exlm import Cache as ExLlamaV2Cache
from exlm import CacheBase as ExLlamaV2CacheBase
from exlm import CacheFP8 as ExLlamaV2Cache_8bit
from exlm import CacheQ4 as ExLlamaV2Cache_Q4
from exlm import CacheQ6 as ExLlamaV2Cache_Q6
from exlm import CacheQ8 as ExLlamaV2Cache_Q8
from exlm import Config as ExLlamaV2Config
from exlm import Lora as ExLlamaV2Lora
from exlm import Model as ExLlamaV2
from exlm import Tokenizer as ExLlamaV2Tokenizer
from exlm import __version__
from exlm.legacy.devices import cache_tp as ExLlamaV2Cache_TP
from exlm.legacy.hooks import Intervention
from exlm.legacy.placeholders import MultimodalProjector as ExLlamaV2MultimodalProjector
from exlm.legacy.placeholders import VisionTower as ExLlamaV2VisionTower
from exlm.legacy.util import SeqTensor, Timer

from . import (  # noqa: F401
    architecture,
    attn,
    cache,
    compat,
    config,
    device,
    embedding,
    ext,
    generator,
    headnorm,
    layernorm,
    linear,
    lora,
    mlp,
    model,
    module,
    moe_mlp,
    parallel_decoder,
    pos_embedding,
    rmsnorm,
    stloader,
    tensor_p,
    tokenizer,
    util,
    version,
    vlm,
)

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MultimodalProjector",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Intervention",
    "SeqTensor",
    "Timer",
    "__version__",
]
