"""For `from exllamav2.tensor_p import …`: placeholders, which say what to use instead."""

from exlm.legacy.devices import BROADCAST_ID, BROADCAST_KV, BROADCAST_Q, BROADCAST_RS, BROADCAST_VC
from exlm.legacy.placeholders import TPContext

__all__ = ["BROADCAST_ID", "BROADCAST_KV", "BROADCAST_Q", "BROADCAST_RS", "BROADCAST_VC", "TPContext"]
