"""For `from exllamav2.moe_mlp import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import MoEMLP as ExLlamaV2MoEMLP

__all__ = ["ExLlamaV2MoEMLP"]
