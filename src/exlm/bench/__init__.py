"""How fast a model is on this machine, end to end, and how near that is to what the machine can do."""

from .benchmark import Plan, run
from .machine import Fact, facts, system
from .peers import ENGINES, compare
from .plot import check_drawing, draw
from .report import Peer, Report, Row
from .shapes import SHAPES, Shape
from .tuning import Tuned, tune
from .weights import FORMS

__all__ = [
    "ENGINES",
    "FORMS",
    "SHAPES",
    "Fact",
    "Peer",
    "Plan",
    "Report",
    "Row",
    "Shape",
    "Tuned",
    "check_drawing",
    "compare",
    "draw",
    "facts",
    "run",
    "system",
    "tune",
]
