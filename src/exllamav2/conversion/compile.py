"""For `from exllamav2.conversion.compile import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import compile_model

__all__ = ["compile_model"]
