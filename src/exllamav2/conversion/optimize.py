"""For `from exllamav2.conversion.optimize import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import optimize

__all__ = ["optimize"]
