"""For `from exllamav2.rope import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import get_rope_params

__all__ = ["get_rope_params"]
