"""Finds and reads the weights of a model: safetensors folders and GGUF files, by role, and writes folders.

It takes a path and `spec.TensorNames`, which map roles (exlm's names, such as `layers.3.attn.q`) to the names that a
family gives its tensors. It gives tensors and `Weight`s that share no memory with the files; `formats` decodes
quantised ones. `FrozenConfig.open_checkpoint` opens a model's. config, lora, model, convert, quantize and bench import
it; kernels do not.
"""

from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import GgufFile
from .safetensors_checkpoint import SafetensorsCheckpoint
from .safetensors_files import SafetensorsFolder
from .source import Checkpoint, WeightSource
from .tensor_files import TensorInfo
from .writer import save_sharded

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "GgufFile",
    "SafetensorsCheckpoint",
    "SafetensorsFolder",
    "TensorInfo",
    "WeightSource",
    "save_sharded",
]
