"""For `from exllamav2.generator.base import …`."""

from exlm import Filter as ExLlamaV2Filter

__all__ = ["ExLlamaV2Filter"]
