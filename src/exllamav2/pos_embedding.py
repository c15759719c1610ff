"""For `from exllamav2.pos_embedding import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import PositionEmbedding as ExLlamaV2PosEmbedding

__all__ = ["ExLlamaV2PosEmbedding"]
