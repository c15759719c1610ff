"""For `from exllamav2.tokenizer import …`."""

from exlm import Tokenizer as ExLlamaV2Tokenizer
from exlm import __version__

__all__ = ["ExLlamaV2Tokenizer", "__version__"]
