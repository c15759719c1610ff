"""For `from exllamav2.mlp import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import MLP as ExLlamaV2MLP

__all__ = ["ExLlamaV2MLP"]
