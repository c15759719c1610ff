"""What a stored matrix means."""

from .dense import DenseWeight
from .packed import PackedWeight, Segment
from .scales import Direct, Nested, Scales, Squared
from .weight import Range, Weight

__all__ = [
    "DenseWeight",
    "Direct",
    "Nested",
    "PackedWeight",
    "Range",
    "Scales",
    "Segment",
    "Squared",
    "Weight",
]
