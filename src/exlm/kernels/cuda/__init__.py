"""CUDA C++ kernels for packed weights and paged decode attention, compiled by NVRTC on first use."""

from .backend import CudaBackend

__all__ = ["CudaBackend"]
