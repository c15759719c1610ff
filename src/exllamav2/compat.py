"""For `from exllamav2.compat import …`."""

from exlm.legacy.devices import pairwise, safe_move_tensor

__all__ = ["pairwise", "safe_move_tensor"]
