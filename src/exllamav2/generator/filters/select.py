"""For `from exllamav2.generator.filters.select import …`."""

from exlm import SelectFilter as ExLlamaV2SelectFilter

__all__ = ["ExLlamaV2SelectFilter"]
