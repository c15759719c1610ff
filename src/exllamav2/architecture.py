"""Refused: architectures are data."""

raise ImportError(
    "exllamav2.architecture does not exist in exlm: a model is described by data, not by a class. "
    "Read the config of an exlm.Model: config.architecture and config.spec."
)
