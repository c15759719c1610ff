"""For `from exllamav2.headnorm import …`: placeholders, which say what to use instead."""

from exlm.legacy.layers import HeadNorm as ExLlamaV2HeadNorm

__all__ = ["ExLlamaV2HeadNorm"]
