"""What only exllamav2 had, for scripts that import it under its old names from the package `exllamav2`.

The base and streaming generators, `Sampler.sample` (`sampler`) and the command line of `model_init` run
on exlm's own engine and sampling; `util` has functions that scripts call; `placeholders` say what to use
instead of names without a counterpart. The package `exllamav2` imports it, and `exlm` its `Sampler`; new code
uses `exlm.LLM` or `exlm.Generator`.
"""

from .arguments import TruncationWarning
from .base_generator import BaseGenerator
from .streaming_generator import Chunk, StreamingGenerator

__all__ = ["BaseGenerator", "Chunk", "StreamingGenerator", "TruncationWarning"]
