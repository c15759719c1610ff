"""For `from exllamav2.attn import …`."""

from exlm.legacy.unavailable import AttentionModule as ExLlamaV2Attention
from exlm.legacy.unavailable import assert_paged_attn

__all__ = ["ExLlamaV2Attention", "assert_paged_attn"]
