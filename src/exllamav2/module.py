"""For `from exllamav2.module import …`."""

from exlm.legacy.hooks import Intervention
from exlm.legacy.placeholders import LayerModule as ExLlamaV2Module

__all__ = ["ExLlamaV2Module", "Intervention"]
