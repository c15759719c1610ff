"""Call shapes that we keep for old scripts and would not choose today, thin over the house's own parts.

`base_generator` and `streaming_generator` are the generators from before the dynamic one; the other names are
what scripts import from the `exllamav2` package and nothing else needs.
"""

from .base_generator import BaseGenerator
from .inputs import TruncationWarning
from .streaming_generator import Chunk, StreamingGenerator

__all__ = ["BaseGenerator", "Chunk", "StreamingGenerator", "TruncationWarning"]
