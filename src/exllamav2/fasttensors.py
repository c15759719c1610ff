"""Refused: there is no second way to read files."""

raise ImportError(
    "exllamav2.fasttensors does not exist in exlm: weights are mapped and read ahead as they are. "
    "Load a model with exlm.Model; config.fasttensors is accepted and has no effect."
)
