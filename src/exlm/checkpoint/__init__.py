"""Files to named tensors and back.

What a stored matrix means is the business of `formats`, and where it goes that of `model`.
"""

from .files import TensorFiles
from .folder import TensorInfo
from .reader import Checkpoint
from .writer import save

__all__ = ["Checkpoint", "TensorFiles", "TensorInfo", "save"]
