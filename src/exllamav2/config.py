"""For `from exllamav2.config import …`."""

from exlm import Config as ExLlamaV2Config

__all__ = ["ExLlamaV2Config"]
