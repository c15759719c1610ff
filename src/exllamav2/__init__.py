"""The modules and names that scripts written for exllamav2 import, each an alias of an exlm object.

Nothing is defined here. This module has the package's own names, `_aliases` those of its submodules, which
are also there without being imported, as in `import exllamav2; exllamav2.util.…`.
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
from exlm.legacy.alias_modules import AliasTable as _AliasTable
from exlm.legacy.alias_modules import install as _install
from exlm.legacy.placeholders import MultimodalProjector as ExLlamaV2MultimodalProjector
from exlm.legacy.placeholders import VisionTower as ExLlamaV2VisionTower
from exlm.legacy.util import Intervention, SeqTensor, Timer
from exlm.legacy.util import cache_tp as ExLlamaV2Cache_TP

from ._aliases import MODULES as _MODULES
from ._aliases import OBJECTS as _OBJECTS
from ._aliases import REFUSED as _REFUSED

__getattr__ = _install(_AliasTable(__name__, _OBJECTS, _MODULES, _REFUSED), __path__)

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
