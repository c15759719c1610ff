"""Resolves the name of a model to a folder or a .gguf file, downloading it if necessary.

`find_model` takes a path, a name on the Hugging Face Hub, or None for the small default model, and returns a
path. It does not open the files; `Config` and `checkpoint` do. `exlm` exports it; the command line uses it.
"""

from .resolve import find_model

__all__ = ["find_model"]
