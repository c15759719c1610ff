"""Embeddings that take the place of tokens in a prompt: images, or anything else that was encoded elsewhere.

`MMEmbedding` takes vectors in the model's hidden size and reserves token ids that no other embedding has, so
that the prefix cache treats them like tokens. The functions give the spans of embeddings in a list of ids,
and M-RoPE positions. `model` and the public package import it; `model` writes the vectors into a batch.
"""

from ..tokenizer import EMBEDDING_INDEX
from .embeddings import MMEmbedding
from .positions import EmbeddingSpan, embedding_spans, mrope_positions

__all__ = ["EMBEDDING_INDEX", "EmbeddingSpan", "MMEmbedding", "embedding_spans", "mrope_positions"]
