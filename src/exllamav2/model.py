"""For `from exllamav2.model import …`."""

from exlm import Model as ExLlamaV2

__all__ = ["ExLlamaV2"]
