"""For `from exllamav2.module import …`."""

from exlm.legacy.intervention import Intervention
from exlm.legacy.layers import LayerModule as ExLlamaV2Module

__all__ = ["ExLlamaV2Module", "Intervention"]
