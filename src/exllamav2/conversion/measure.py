"""For `from exllamav2.conversion.measure import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import embeddings, measure_quant

__all__ = ["embeddings", "measure_quant"]
