"""For `from exllamav2.generator.dynamic_async import …`."""

from exlm import AsyncGenerator as ExLlamaV2DynamicGeneratorAsync
from exlm import AsyncJob as ExLlamaV2DynamicJobAsync

__all__ = ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"]
