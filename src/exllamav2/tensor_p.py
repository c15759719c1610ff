"""For `from exllamav2.tensor_p import …`: placeholders, which say what to use instead."""

from exlm.legacy.internals import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    BROADCAST_VC,
    TPContext,
)

__all__ = ["BROADCAST_ID", "BROADCAST_KV", "BROADCAST_Q", "BROADCAST_RS", "BROADCAST_VC", "TPContext"]
