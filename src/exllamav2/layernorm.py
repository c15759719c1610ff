"""For `from exllamav2.layernorm import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import LayerNorm as ExLlamaV2LayerNorm

__all__ = ["ExLlamaV2LayerNorm"]
