"""Kernels: backends that turn weights and layer descriptions into callables while a model loads.

`interface` says what a backend offers; `dispatch` asks the backends of a device in order of preference and
records which one took what; `reference`, `cpu`, `cuda` and `triton` are the backends. They take `formats`
weights and `spec` descriptions and give callables on tensors. `nn`, `kvcache` and all above may import them.
"""
