"""For `from exllamav2.architecture import …`."""

from exlm.legacy.internals import ArchParams as ExLlamaV2ArchParams
from exlm.legacy.internals import RopeStyle

__all__ = ["ExLlamaV2ArchParams", "RopeStyle"]
