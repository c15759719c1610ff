"""For `from exllamav2.conversion.bot_status import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import print_stage

__all__ = ["print_stage"]
