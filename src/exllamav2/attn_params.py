"""For `from exllamav2.attn_params import …`: placeholders, which say what to use instead."""

from exlm.legacy.unavailable import AttentionParams as Params
from exlm.legacy.unavailable import PagedAttentionParams as PagedParams

__all__ = ["PagedParams", "Params"]
