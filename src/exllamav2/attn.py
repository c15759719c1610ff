"""Refused: the attention modules are not public."""

raise ImportError(
    "exllamav2.attn does not exist in exlm: attention is built while loading and has no public module. "
    "Use exlm.Model; its forward() works without a call to assert_paged_attn()."
)
