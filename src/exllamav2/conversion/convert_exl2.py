"""Refused: importing it was running it."""

raise ImportError(
    "exllamav2.conversion.convert_exl2 does not exist in exlm: make EXL2 models with `exlm quantize`, or "
    "with exlm.quantize_model, where a measurement.json of the old converter works too; load them with "
    "exlm.Model."
)
