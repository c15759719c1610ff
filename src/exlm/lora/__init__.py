"""LoRA adapters, installed in a loaded model and used by the rows of a batch that name them.

It takes a PEFT folder and the modules of a loaded model, checks one against the other, and puts adapted
modules in the place of those that the adapter changes (`Lora`, what users hold). For a batch it turns the
`loras` argument of a call into `LoraRef`s, which the adapted modules look up. `model` and the public package
import it.
"""

from .adapter import InstallLora, Lora, ModelHandle, ModuleChange, RemoveLora, active_loras, resolve_loras
from .peft_files import LoraWeights

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
