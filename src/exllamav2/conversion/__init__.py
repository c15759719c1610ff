"""Refused: quantising is not a module to import."""

raise ImportError(
    "exllamav2.conversion does not exist in exlm: make EXL2 models with `exlm quantize`, or with "
    "exlm.quantize_model, where a measurement.json of the old converter works too; load them with exlm.Model."
)
