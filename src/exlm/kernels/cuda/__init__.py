"""Kernels in CUDA C++, compiled on first use: packed matrices at the memory's speed."""

from .backend import CudaBackend

__all__ = ["CudaBackend"]
