"""For `from exllamav2.vlm.processor.pixtral import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import position_embeddings, postprocess, preprocess

__all__ = ["position_embeddings", "postprocess", "preprocess"]
