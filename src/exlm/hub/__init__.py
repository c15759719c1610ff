"""FROM A NAME TO FILES: what the user calls a model becomes a folder or a .gguf file on this machine.

Nothing here opens a model: whether the files are any good is for `Config` and `checkpoint` to say.
"""

from .resolve import find_model

__all__ = ["find_model"]
