"""Files to named tensors and back.

What a stored matrix means is the business of `formats`, and where it goes that of `model`.
"""

from .files import TensorFiles
from .folder import TensorInfo
from .gguf_file import GgufFile
from .gguf_reader import GgufCheckpoint
from .reader import Checkpoint
from .source import Source, open_source
from .writer import save

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "GgufFile",
    "Source",
    "TensorFiles",
    "TensorInfo",
    "open_source",
    "save",
]
