"""For `from exllamav2.generator.filters import …`."""

from exlm import Filter as ExLlamaV2Filter
from exlm import PrefixFilter as ExLlamaV2PrefixFilter
from exlm import SelectFilter as ExLlamaV2SelectFilter
from exlm import __version__

__all__ = ["ExLlamaV2Filter", "ExLlamaV2PrefixFilter", "ExLlamaV2SelectFilter", "__version__"]
