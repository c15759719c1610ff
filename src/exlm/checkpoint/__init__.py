"""Finds and reads the weights of a model: safetensors folders and GGUF files, by role, and writes folders.

It takes a path and the names a family gives its tensors (`spec.TensorNames`), and gives tensors and `Weight`s
that share no memory with the files; `formats` decodes quantised ones. config, lora, model, convert, quantize
and bench import it; kernels do not.
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
