"""For `from exllamav2.rmsnorm import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import RMSNorm as ExLlamaV2RMSNorm

__all__ = ["ExLlamaV2RMSNorm"]
