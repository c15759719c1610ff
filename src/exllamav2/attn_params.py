"""For `from exllamav2.attn_params import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import AttentionParams as Params
from exlm.legacy.placeholders import PagedAttentionParams as PagedParams

__all__ = ["PagedParams", "Params"]
