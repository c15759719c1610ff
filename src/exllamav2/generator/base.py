"""For `from exllamav2.generator.base import …`."""

from exlm import Filter as ExLlamaV2Filter
from exlm.legacy.base_generator import BaseGenerator as ExLlamaV2BaseGenerator

__all__ = ["ExLlamaV2BaseGenerator", "ExLlamaV2Filter"]
