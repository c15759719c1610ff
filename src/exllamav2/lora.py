"""For `from exllamav2.lora import …`."""

from exlm import Lora as ExLlamaV2Lora

__all__ = ["ExLlamaV2Lora"]
