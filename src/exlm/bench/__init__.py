"""Benchmarks behind `exlm bench`, `exlm tune` and `exlm info --system`.

`run` takes a `BenchmarkConfig` and gives a `Report`: speed of a model (in files, or random weights of a given
shape) through the generator, beside the machine's memory bandwidth and GEMM throughput. `compare` runs other
engines, `compare_mixes` does so on GGUF files of random weights; `tune` searches kernel settings. Only `cli` imports
this package, and scripts in benchmarks/.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig, run
    from .comparison import ENGINES, compare
    from .gguf_mix import Mix
    from .llama_builds import build_command, missing_sets
    from .mix_comparison import compare_mixes, load_average, mixes_json
    from .report import (
        BenchmarkRow,
        Comparison,
        EngineResult,
        MixResult,
        Report,
        require_matplotlib,
        save_comparison_plot,
        save_plot,
    )
    from .shapes import FORMATS, MIXES, SHAPES, Shape
    from .system_info import describe_hardware, describe_system
    from .tuning import TuningResult, tune

_EXPORTS = {
    "benchmark": ("BenchmarkConfig", "run"),
    "system_info": ("describe_hardware", "describe_system"),
    "comparison": ("ENGINES", "compare"),
    "gguf_mix": ("Mix",),
    "llama_builds": ("build_command", "missing_sets"),
    "mix_comparison": ("compare_mixes", "load_average", "mixes_json"),
    "report": (
        "Comparison",
        "EngineResult",
        "MixResult",
        "BenchmarkRow",
        "Report",
        "require_matplotlib",
        "save_comparison_plot",
        "save_plot",
    ),
    "shapes": ("FORMATS", "MIXES", "SHAPES", "Shape"),
    "tuning": ("TuningResult", "tune"),
}

__all__ = [
    "ENGINES",
    "FORMATS",
    "MIXES",
    "SHAPES",
    "BenchmarkConfig",
    "BenchmarkRow",
    "Comparison",
    "EngineResult",
    "Mix",
    "MixResult",
    "Report",
    "Shape",
    "TuningResult",
    "build_command",
    "compare",
    "compare_mixes",
    "describe_hardware",
    "describe_system",
    "load_average",
    "missing_sets",
    "mixes_json",
    "require_matplotlib",
    "run",
    "save_comparison_plot",
    "save_plot",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, globals(), _EXPORTS)
