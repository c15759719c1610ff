"""For `from exllamav2.generator.ngram import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import NgramCache, NgramCacheNode

__all__ = ["NgramCache", "NgramCacheNode"]
