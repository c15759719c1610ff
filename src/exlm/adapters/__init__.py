"""Small changes to a loaded model, which each row of a batch may use or not.

`lora` is what users hold, `peft` reads an adapter's folder, `targets` knows what its names stand for, and
`modules` are what takes the place of the modules an adapter touches.
"""

from .lora import Lora, Open, activate, chosen

__all__ = ["Lora", "Open", "activate", "chosen"]
