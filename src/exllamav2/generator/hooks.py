"""For `from exllamav2.generator.hooks import …`."""

from exlm import PostSamplingResult as ExLlamaV2PostSamplingResult
from exlm.legacy.hooks import PostSamplingHook as ExLlamaV2PostSamplingHook

__all__ = ["ExLlamaV2PostSamplingHook", "ExLlamaV2PostSamplingResult"]
