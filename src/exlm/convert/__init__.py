"""Converts a model folder or GGUF file to safetensors: as it is packed, re-encoded, or dequantised.

Users call `convert_model` (`api`). `plan` decides what happens to each tensor, `from_folder` and `from_gguf`
read the source, `side_files` writes config.json and the tokenizer; `quantize` uses the same plan.
"""
