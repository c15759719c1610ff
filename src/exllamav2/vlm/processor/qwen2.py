"""For `from exllamav2.vlm.processor.qwen2 import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import position_embeddings, postprocess, preprocess

__all__ = ["position_embeddings", "postprocess", "preprocess"]
