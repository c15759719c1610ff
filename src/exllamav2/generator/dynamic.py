"""For `from exllamav2.generator.dynamic import …`."""

from exlm import AsyncGenerator as ExLlamaV2DynamicGeneratorAsync
from exlm import AsyncJob as ExLlamaV2DynamicJobAsync
from exlm import Generator as ExLlamaV2DynamicGenerator
from exlm import Job as ExLlamaV2DynamicJob

__all__ = [
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
]
