"""Triton kernels for CUDA devices: attention over the paged KV cache, RoPE, norms and activation functions.

A backend (`kernels.interface`) that takes everything of a decoder layer but its matrices; Triton compiles
the kernels at first use. `sampling_*` are the sampler's kernels. `kernels.dispatch` imports the backend,
`sampling` its kernels.
"""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
