"""For `from exllamav2.vlm.vision_tower import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import VisionTower as ExLlamaV2VisionTower

__all__ = ["ExLlamaV2VisionTower"]
