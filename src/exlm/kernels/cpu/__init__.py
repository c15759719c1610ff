"""Kernels in C for processors: packed matrices multiplied straight from their codes."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
