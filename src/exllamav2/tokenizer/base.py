"""For `from exllamav2.tokenizer.base import …`."""

from exlm.legacy.tokenization import Vocabulary as ExLlamaV2TokenizerBase

__all__ = ["ExLlamaV2TokenizerBase"]
