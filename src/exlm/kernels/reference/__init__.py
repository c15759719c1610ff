"""Plain torch on any device: the definition of correct, and the oracle of every faster backend.

`ReferenceBackend` runs every part of a model and declines none. Other backends import its attention, RoPE
tables and norms for calls that their kernels do not take; `kernels.dispatch`, `lora`, `quantize` and tests
import it.
"""

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
