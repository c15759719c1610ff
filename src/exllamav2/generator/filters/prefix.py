"""For `from exllamav2.generator.filters.prefix import …`."""

from exlm import PrefixFilter as ExLlamaV2PrefixFilter

__all__ = ["ExLlamaV2PrefixFilter"]
