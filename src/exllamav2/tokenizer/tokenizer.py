"""For `from exllamav2.tokenizer.tokenizer import …`."""

from exlm import Tokenizer as ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2Tokenizer"]
