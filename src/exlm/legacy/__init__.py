"""What only exllamav2 had, for scripts that import it under its old names from the package `exllamav2`.

The base and streaming generators and the command line of `model_init` run on exlm's own engine; `util`,
`devices`, `hooks` and `tokenization` are helpers that scripts use; `placeholders` explain what has no
counterpart. Only the package `exllamav2` imports it: new code uses `exlm.LLM` or `exlm.Generator`.
"""

from .base_generator import BaseGenerator
from .inputs import TruncationWarning
from .streaming_generator import Chunk, StreamingGenerator

__all__ = ["BaseGenerator", "Chunk", "StreamingGenerator", "TruncationWarning"]
