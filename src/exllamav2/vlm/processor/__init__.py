"""For `from exllamav2.vlm.processor import …`."""

from . import pixtral, qwen2, siglip

__all__ = ["pixtral", "qwen2", "siglip"]
