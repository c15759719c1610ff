"""Refused: there is no compiled extension to import."""

raise ImportError(
    "exllamav2.ext does not exist in exlm: nothing is compiled and no kernel is called by hand. "
    "Load a model with exlm.Model and let it choose its kernels."
)
