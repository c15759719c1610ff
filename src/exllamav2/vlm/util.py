"""For `from exllamav2.vlm.util import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import (
    convert_to_rgb,
    normalize_image,
    size_to_longest_edge_and_patch_size,
    smart_resize,
)

__all__ = ["convert_to_rgb", "normalize_image", "size_to_longest_edge_and_patch_size", "smart_resize"]
