"""For `from exllamav2.generator.sampler import …`."""

from exlm import Sampler as ExLlamaV2Sampler

__all__ = ["ExLlamaV2Sampler"]
