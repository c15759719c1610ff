"""How fast a model is on this machine, end to end, and how near that is to what the machine can do."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .benchmark import Plan, run
    from .machine import Fact, facts, system
    from .peers import ENGINES, compare
    from .plot import check_drawing, draw
    from .report import Peer, Report, Row
    from .shapes import FORMS, SHAPES, Shape
    from .tuning import Tuned, tune

_EXPORTS = {
    "benchmark": ("Plan", "run"),
    "machine": ("Fact", "facts", "system"),
    "peers": ("ENGINES", "compare"),
    "plot": ("check_drawing", "draw"),
    "report": ("Peer", "Report", "Row"),
    "shapes": ("FORMS", "SHAPES", "Shape"),
    "tuning": ("Tuned", "tune"),
}

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, globals(), _EXPORTS)
