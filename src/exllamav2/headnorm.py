"""For `from exllamav2.headnorm import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import HeadNorm as ExLlamaV2HeadNorm

__all__ = ["ExLlamaV2HeadNorm"]
