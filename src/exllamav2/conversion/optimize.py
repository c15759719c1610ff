"""For `from exllamav2.conversion.optimize import …`: placeholders, which say what to use instead."""

from exlm.legacy.converter import optimize

__all__ = ["optimize"]
