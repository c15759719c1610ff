"""For `from exllamav2.generator import …`."""

from exlm import AsyncGenerator as ExLlamaV2DynamicGeneratorAsync
from exlm import AsyncJob as ExLlamaV2DynamicJobAsync
from exlm import Generator as ExLlamaV2DynamicGenerator
from exlm import Job as ExLlamaV2DynamicJob
from exlm import MMEmbedding as ExLlamaV2MMEmbedding
from exlm import PostSamplingResult as ExLlamaV2PostSamplingResult
from exlm import Sampler as ExLlamaV2Sampler
from exlm import __version__
from exlm.legacy.base_generator import BaseGenerator as ExLlamaV2BaseGenerator
from exlm.legacy.hooks import PostSamplingHook as ExLlamaV2PostSamplingHook
from exlm.legacy.streaming_generator import StreamingGenerator as ExLlamaV2StreamingGenerator

__all__ = [
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2Sampler",
    "ExLlamaV2StreamingGenerator",
    "__version__",
]
