"""Refused: modules are not public."""

raise ImportError(
    "exllamav2.rmsnorm does not exist in exlm: modules are built while loading and are not public. "
    "Use exlm.Model; its explain() says what runs each part."
)
