"""Kernels of the sampler, one program for each row; imported only where Triton is installed."""
