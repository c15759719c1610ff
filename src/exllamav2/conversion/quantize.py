"""For `from exllamav2.conversion.quantize import …`."""

from exlm.legacy.converter import quant
from exlm.legacy.memory import list_live_tensors

__all__ = ["list_live_tensors", "quant"]
