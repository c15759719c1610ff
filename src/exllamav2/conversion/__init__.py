"""Refused: quantising is not a module to import."""

raise ImportError(
    "exllamav2.conversion does not exist in exlm: there is no converter to call. "
    "Convert files with exlm.convert_model; load them with exlm.Model."
)
