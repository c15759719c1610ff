"""Small changes to a loaded model, which each row of a batch may use or not.

`lora` is what users hold, `peft` and `tensors` read an adapter's files, `targets` knows what its names stand
for, `changes` are the steps that install and remove it, and `modules` are what takes the place of the modules
it touches.
"""

from .changes import Change, Install, Remove
from .lora import Lora, Open, activate, chosen
from .modules import Pair

__all__ = ["Change", "Install", "Lora", "Open", "Pair", "Remove", "activate", "chosen"]
