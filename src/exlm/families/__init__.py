"""Turns a model's config.json, or a GGUF file's metadata, into a `spec.Model`.

It takes parsed JSON (`ConfigReader`) and gives frozen data: `build_spec` finds the architecture's pure
function in `FAMILIES`; `overrides` applies a user's changes, such as a longer context. config, tokenizer and
the packages above them may import it; it imports only errors and spec, and no torch.
"""

from .config_reader import ConfigReader
from .registry import FAMILIES, build_spec

__all__ = ["FAMILIES", "ConfigReader", "build_spec"]
