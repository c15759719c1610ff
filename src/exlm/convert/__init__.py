"""Converts a model to another format or container without changing a number of its weights.

It takes a model folder or a GGUF file and writes a folder of safetensors, config.json and tokenizer files:
`convert_model` (`api`) is what users call. `plan` decides from headers what becomes of each tensor,
`planners` does so for a folder or a GGUF file, and `side_files` makes the files beside the weights. quantize,
which writes its models with the same plan, and the packages above it may import it.
"""
