"""For `from exllamav2.conversion.adaptivegptq import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import AdaptiveGPTQ

__all__ = ["AdaptiveGPTQ"]
