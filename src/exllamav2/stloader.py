"""Refused: there is no loader to call by hand."""

raise ImportError(
    "exllamav2.stloader does not exist in exlm: files are opened while a model loads. "
    "Load a model with exlm.Model; read single tensors with the safetensors package."
)
