"""For `from exllamav2.intervention import …`."""

from exlm.legacy.intervention import Intervention

__all__ = ["Intervention"]
