"""For `from exllamav2.tokenizer.hf import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import JsonVocabulary as ExLlamaV2TokenizerHF

__all__ = ["ExLlamaV2TokenizerHF"]
