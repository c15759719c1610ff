"""For `from exllamav2.intervention import …`."""

from exlm.legacy.hooks import Intervention

__all__ = ["Intervention"]
