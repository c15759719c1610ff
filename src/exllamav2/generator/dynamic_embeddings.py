"""For `from exllamav2.generator.dynamic_embeddings import …`."""

from exlm import EMBEDDING_INDEX
from exlm import MMEmbedding as ExLlamaV2MMEmbedding

__all__ = ["EMBEDDING_INDEX", "ExLlamaV2MMEmbedding"]
