"""Triton kernels for a CUDA device: everything of a decoder layer but its matrices."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
