"""For `from exllamav2.embedding import …`."""

from exlm import EMBEDDING_INDEX
from exlm.legacy.placeholders import EmbeddingModule as ExLlamaV2Embedding

__all__ = ["EMBEDDING_INDEX", "ExLlamaV2Embedding"]
