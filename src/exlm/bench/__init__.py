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
    from .report import (
        BenchmarkRow,
        Comparison,
        EngineResult,
        Report,
        require_matplotlib,
        save_comparison_plot,
        save_plot,
    )
    from .shapes import FORMATS, SHAPES, Shape
    from .system_info import describe_hardware, describe_system
    from .tuning import TuningResult, tune

_EXPORTS = {
    "benchmark": ("BenchmarkConfig", "run"),
    "system_info": ("describe_hardware", "describe_system"),
    "comparison": ("ENGINES", "compare"),
    "report": (
        "Comparison",
        "EngineResult",
        "BenchmarkRow",
        "Report",
        "require_matplotlib",
        "save_comparison_plot",
        "save_plot",
    ),
    "shapes": ("FORMATS", "SHAPES", "Shape"),
    "tuning": ("TuningResult", "tune"),
}

__all__ = [
    "ENGINES",
    "FORMATS",
    "SHAPES",
    "BenchmarkConfig",
    "BenchmarkRow",
    "Comparison",
    "EngineResult",
    "Report",
    "Shape",
    "TuningResult",
    "compare",
    "describe_hardware",
    "describe_system",
    "require_matplotlib",
    "run",
    "save_comparison_plot",
    "save_plot",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, globals(), _EXPORTS)
