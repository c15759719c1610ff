"""For `from exllamav2.tokenizer.spm import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import SentencePieceVocabulary as ExLlamaV2TokenizerSPM

__all__ = ["ExLlamaV2TokenizerSPM"]
