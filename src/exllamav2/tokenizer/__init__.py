"""For `from exllamav2.tokenizer import …`."""

from exlm import Tokenizer as ExLlamaV2Tokenizer
from exlm import __version__
from exlm.legacy.placeholders import JsonVocabulary as ExLlamaV2TokenizerHF
from exlm.legacy.placeholders import SentencePieceVocabulary as ExLlamaV2TokenizerSPM
from exlm.legacy.tokenization import Vocabulary as ExLlamaV2TokenizerBase

__all__ = [
    "ExLlamaV2Tokenizer",
    "ExLlamaV2TokenizerBase",
    "ExLlamaV2TokenizerHF",
    "ExLlamaV2TokenizerSPM",
    "__version__",
]
