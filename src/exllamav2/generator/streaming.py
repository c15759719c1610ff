"""For `from exllamav2.generator.streaming import …`."""

from exlm.legacy.streaming_generator import StreamingGenerator as ExLlamaV2StreamingGenerator

__all__ = ["ExLlamaV2StreamingGenerator"]
