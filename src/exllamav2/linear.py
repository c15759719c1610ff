"""For `from exllamav2.linear import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import Linear as ExLlamaV2Linear

__all__ = ["ExLlamaV2Linear"]
