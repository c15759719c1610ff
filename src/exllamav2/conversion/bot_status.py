"""For `from exllamav2.conversion.bot_status import …`: placeholders, which say what to use instead."""

from exlm.legacy.converter import print_stage

__all__ = ["print_stage"]
