"""For `from exllamav2.compat import …`."""

from exlm.legacy.devices import safe_move_tensor
from exlm.legacy.util import pairwise

__all__ = ["pairwise", "safe_move_tensor"]
