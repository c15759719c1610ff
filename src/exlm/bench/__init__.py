"""Benchmarks behind `exlm bench`, `exlm tune` and `exlm info --system`.

`run` takes a `BenchmarkConfig` and gives a `Report`: speed of a model (in files, or random weights of a given
shape) through the generator, beside the machine's memory bandwidth and GEMM throughput. `compare` runs other
engines, `tune` searches kernel settings. Only `cli` imports this package, and scripts in benchmarks/.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig, run
    from .comparison import ENGINES, compare
    from .report import Peer, Report, Row, require_matplotlib, save_plot
    from .shapes import FORMATS, SHAPES, Shape
    from .system_info import Fact, facts, system_facts
    from .tuning import TuningResult, tune

_EXPORTS = {
    "benchmark": ("BenchmarkConfig", "run"),
    "system_info": ("Fact", "facts", "system_facts"),
    "comparison": ("ENGINES", "compare"),
    "report": ("Peer", "Report", "Row", "require_matplotlib", "save_plot"),
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
