"""For `from exllamav2.conversion.quantize import …`."""

from exlm.legacy.devices import list_live_tensors
from exlm.legacy.placeholders import quant

__all__ = ["list_live_tensors", "quant"]
