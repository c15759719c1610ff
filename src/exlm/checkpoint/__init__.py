"""Files to named tensors and back.

What a stored matrix means is the business of `formats`, and where it goes that of `model`.
"""

from .gguf_file import GgufFile
from .gguf_reader import GgufCheckpoint
from .reader import SafetensorsCheckpoint
from .safetensors_folder import SafetensorsFolder, TensorInfo
from .source import WeightSource, open_source
from .writer import save

__all__ = [
    "GgufCheckpoint",
    "GgufFile",
    "SafetensorsCheckpoint",
    "SafetensorsFolder",
    "TensorInfo",
    "WeightSource",
    "open_source",
    "save",
]
