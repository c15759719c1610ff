"""For `from exllamav2.conv import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import Convolution as ExLlamaV2Conv

__all__ = ["ExLlamaV2Conv"]
