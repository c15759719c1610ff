"""For `from exllamav2.attn import …`."""

from exlm.legacy.placeholders import AttentionModule as ExLlamaV2Attention
from exlm.legacy.placeholders import (
    assert_paged_attn,
    has_flash_attn,
    has_flash_attn_with_paged,
    has_flash_attn_with_softcap,
    has_flash_attn_with_window,
    has_lower_right_sdpa,
    has_xformers,
)

__all__ = [
    "ExLlamaV2Attention",
    "assert_paged_attn",
    "has_flash_attn",
    "has_flash_attn_with_paged",
    "has_flash_attn_with_softcap",
    "has_flash_attn_with_window",
    "has_lower_right_sdpa",
    "has_xformers",
]
