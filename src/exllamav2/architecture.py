"""For `from exllamav2.architecture import …`."""

from exlm.legacy.placeholders import ArchParams as ExLlamaV2ArchParams
from exlm.legacy.placeholders import RopeStyle

__all__ = ["ExLlamaV2ArchParams", "RopeStyle"]
