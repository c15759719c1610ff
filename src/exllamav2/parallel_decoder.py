"""For `from exllamav2.parallel_decoder import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import ParallelDecoder as ExLlamaV2ParallelDecoder

__all__ = ["ExLlamaV2ParallelDecoder"]
