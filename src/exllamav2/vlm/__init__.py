"""For `from exllamav2.vlm import …`."""

from exlm import __version__
from exlm.legacy.placeholders import MultimodalProjector as ExLlamaV2MultimodalProjector
from exlm.legacy.placeholders import VisionTower as ExLlamaV2VisionTower

__all__ = ["ExLlamaV2MultimodalProjector", "ExLlamaV2VisionTower", "__version__"]
