"""For `from exllamav2.generator.dynamic import …`."""

from exlm import Generator as ExLlamaV2DynamicGenerator
from exlm import Job as ExLlamaV2DynamicJob

__all__ = ["ExLlamaV2DynamicGenerator", "ExLlamaV2DynamicJob"]
