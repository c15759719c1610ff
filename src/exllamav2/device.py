"""Refused: there is no context of a device."""

raise ImportError(
    "exllamav2.device does not exist in exlm: a model keeps no scratch memory to ask for. "
    "Load a model with exlm.Model; config.device chooses where."
)
