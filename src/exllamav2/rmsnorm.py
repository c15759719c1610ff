"""For `from exllamav2.rmsnorm import …`: placeholders, which say what to use instead."""

from exlm.legacy.layers import RMSNorm as ExLlamaV2RMSNorm

__all__ = ["ExLlamaV2RMSNorm"]
