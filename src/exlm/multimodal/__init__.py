"""Vectors that enter a model in place of tokens: pictures, or anything else that has been embedded.

An embedding owns ids that no other has, so that a prompt that holds them is cached and compared like any
other. Here is what it is and where its tokens stand; laying it over a batch is `model`'s work.
"""

from ..tokenizer import EMBEDDING_INDEX
from .embeddings import MMEmbedding
from .positions import EmbeddingSpan, embedding_spans, mrope_positions

__all__ = ["EMBEDDING_INDEX", "EmbeddingSpan", "MMEmbedding", "embedding_spans", "mrope_positions"]
