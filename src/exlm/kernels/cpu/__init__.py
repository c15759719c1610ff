"""CPU kernels: matrix products, attention and whole decoder layers, in C for each instruction set.

`CpuBackend` takes the weights of a checkpoint, repacks them once and returns the callables of
`kernels.interface`; they compute in float32 on `torch.get_num_threads()` threads. `kernels.dispatch` imports
the backend, `bench` the list of instruction sets; how a product runs is told in `csrc/exlm_cpu.c`.
"""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
