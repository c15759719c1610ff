"""For `from exllamav2.fasttensors import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import SafetensorsFile as STFile
from exlm.legacy.placeholders import cleanup_stfiles

__all__ = ["STFile", "cleanup_stfiles"]
