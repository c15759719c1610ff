"""What a stored matrix means."""

from .packed import PackedWeight, Segment
from .scales import Exl2Scales, KQuantScales, PlainScales, Scales
from .weight import DenseWeight, Range, Weight

__all__ = [
    "DenseWeight",
    "Exl2Scales",
    "KQuantScales",
    "PackedWeight",
    "PlainScales",
    "Range",
    "Scales",
    "Segment",
    "Weight",
]
