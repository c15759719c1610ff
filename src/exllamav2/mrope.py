"""For `from exllamav2.mrope import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import gen_mrope_embed

__all__ = ["gen_mrope_embed"]
