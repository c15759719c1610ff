"""For `from exllamav2.util import …`."""

from exlm.legacy.seq_tensor import SeqTensor
from exlm.legacy.timer import Timer

__all__ = ["SeqTensor", "Timer"]
