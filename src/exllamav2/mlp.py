"""For `from exllamav2.mlp import …`: placeholders, which say what to use instead."""

from exlm.legacy.layers import MLP as ExLlamaV2MLP

__all__ = ["ExLlamaV2MLP"]
