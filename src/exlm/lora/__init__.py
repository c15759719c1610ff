"""Small changes to a loaded model, which each row of a batch may use or not.

`lora` is what users hold, `peft` and `tensors` read an adapter's files, `targets` knows what its names stand
for, `changes` are the steps that install and remove it, and `modules` are what takes the place of the modules
it touches.
"""

from .adapter import Lora, ModelHandle, active_loras, resolve_loras
from .apply import InstallLora, LoraWeights, ModuleChange, RemoveLora

__all__ = [
    "InstallLora",
    "Lora",
    "LoraWeights",
    "ModelHandle",
    "ModuleChange",
    "RemoveLora",
    "active_loras",
    "resolve_loras",
]
