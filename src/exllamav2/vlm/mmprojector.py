"""For `from exllamav2.vlm.mmprojector import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import MultimodalProjector as ExLlamaV2MultimodalProjector

__all__ = ["ExLlamaV2MultimodalProjector"]
