"""Plain torch on any device: the definition of correct, and the oracle of every faster backend."""

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
