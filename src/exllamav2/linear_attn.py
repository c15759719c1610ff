"""For `from exllamav2.linear_attn import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import LinearAttention as ExLlamaV2LinearAttention

__all__ = ["ExLlamaV2LinearAttention"]
