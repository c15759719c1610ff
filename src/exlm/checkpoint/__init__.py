"""Finds and reads the weights of a model: safetensors folders and GGUF files, by role, and writes folders.

It takes a path and the names a family gives its tensors (`spec.TensorNames`), and gives tensors and `Weight`s
that share no memory with the files; `formats` decodes quantised ones. config, lora, model, convert, quantize
and bench import it; kernels do not.
"""

from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import GgufFile
from .safetensors_checkpoint import SafetensorsCheckpoint
from .safetensors_files import SafetensorsFolder, TensorInfo
from .source import WeightSource, open_source
from .writer import save_sharded

__all__ = [
    "GgufCheckpoint",
    "GgufFile",
    "SafetensorsCheckpoint",
    "SafetensorsFolder",
    "TensorInfo",
    "WeightSource",
    "open_source",
    "save_sharded",
]
