"""Finds and reads the weights of a model: safetensors folders and GGUF files, by role, and writes folders.

It takes a path and `spec.TensorNames`, which map roles (exlm's names, such as `layers.3.attn.q`) to the names that a
family gives its tensors. It gives tensors and `Weight`s that share no memory with the files; `formats` decodes
quantised ones. config, lora, model, convert, quantize
and bench import it; kernels do not.
"""

from __future__ import annotations

from pathlib import Path

from ..formats.quantization_config import QuantizationConfig
from ..spec.tensor_names import TensorNames
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
    "open_source",
    "save_sharded",
]


def open_source(path: Path, names: TensorNames, quantization: QuantizationConfig | None = None) -> Checkpoint:
    """The weights at a path: a GGUF file, or a folder of safetensors spelt as `names` says."""
    if path.is_file():
        return GgufCheckpoint.open(path)
    return SafetensorsCheckpoint.open(path, names, quantization)
