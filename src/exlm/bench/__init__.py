"""How fast a model is on this machine, end to end, and how near that is to what the machine can do."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig, run
    from .comparison import ENGINES, compare
    from .plot import require_matplotlib, save_plot
    from .report import Peer, Report, Row
    from .shapes import FORMATS, SHAPES, Shape
    from .system_info import Fact, facts, system_facts
    from .tuning import TuningResult, tune

_EXPORTS = {
    "benchmark": ("BenchmarkConfig", "run"),
    "system_info": ("Fact", "facts", "system_facts"),
    "comparison": ("ENGINES", "compare"),
    "plot": ("require_matplotlib", "save_plot"),
    "report": ("Peer", "Report", "Row"),
    "shapes": ("FORMATS", "SHAPES", "Shape"),
    "tuning": ("TuningResult", "tune"),
}

__all__ = [
    "ENGINES",
    "FORMATS",
    "SHAPES",
    "BenchmarkConfig",
    "Fact",
    "Peer",
    "Report",
    "Row",
    "Shape",
    "TuningResult",
    "compare",
    "facts",
    "require_matplotlib",
    "run",
    "save_plot",
    "system_facts",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, globals(), _EXPORTS)
