"""The results of a benchmark as plain data, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..errors import BadFile, MissingExtra

BOUND_SHARE = 0.4
"""From this share of a limit on the work counts as bound by it."""


_JSON_KEYS = {
    "tokens_per_second": "rate",
    "step_seconds": "step",
    "bytes_read": "read",
    "bandwidth_share": "bandwidth",
    "flops_share": "products",
    "idle_share": "idle",
    "tokens_per_row_step": "each",
    "format": "form",
    "weight_bytes": "weights",
    "load_seconds": "load",
    "first_token_seconds": "first",
    "peak_memory": "memory",
    "flops": "products",
}
"""The keys of `--json` that differ from the field's name here."""


@dataclass(frozen=True)
class BenchmarkRow:
    """The speed of one kind of work at one size, or a plan to measure it; shares are between 0 and 1."""

    work: str  # "prompt", "decode", or "ngram": decode with n-gram speculation
    cache: str
    context: int  # tokens in the cache half way through the timed steps; the length of a prompt
    batch: int
    tokens_per_second: float | None = None  # of all rows together; None if the cache does not fit
    step_seconds: float = 0.0
    bytes_read: int = 0  # of weights and KV cache, which a step must read
    bandwidth_share: float = 0.0
    flops_share: float = 0.0
    idle_share: float = 0.0  # of a step, spent outside forward passes
    bound: str = "does not fit"
    tokens_per_row_step: float = 1.0


@dataclass(frozen=True)
class EngineResult:
    """The metrics of one engine, one value for each turn."""

    engine: str
    values: dict[str, list[float]]
    build: dict[str, str] = field(default_factory=dict)  # `package`; of llama.cpp its line of `instruction_sets`

    def median(self, metric: str) -> float | None:
        """The median over the turns; None if the engine has no such metric."""
        return median(self.values[metric]) if self.values.get(metric) else None


@dataclass(frozen=True)
class MixResult:
    """Engines on one file of random weights with one number of threads, and the processor's limits in that run."""

    mix: str
    types: dict[str, int]  # of the file's matrices, and how many have each
    bits: float  # per weight, of all matrices
    file_bytes: int
    bytes_per_token: int  # of weights that a decode step reads
    prompt_products: int  # of weights and activations for a token of a prompt
    threads: int
    bandwidth: float  # bytes/s read
    int8_peak: float | None  # operations/s of byte dot products; None: not measured
    peers: tuple[EngineResult, ...]
    skipped: tuple[str, ...] = ()

    def decode_share(self, engine: EngineResult) -> float | None:
        """The rate at which decoding reads weights, as a share of the bandwidth."""
        rate = engine.median("decode")
        return None if rate is None else rate * self.bytes_per_token / self.bandwidth

    def prompt_share(self, engine: EngineResult) -> float | None:
        """The rate of a prompt's products, two operations each, as a share of the peak of byte products."""
        rate = engine.median("prompt")
        return None if rate is None or not self.int8_peak else 2 * rate * self.prompt_products / self.int8_peak

    def json(self) -> dict[str, Any]:
        """The result as lists and dicts, with the shares of each engine."""
        shares = {
            one.engine: {"decode": self.decode_share(one), "prompt": self.prompt_share(one)} for one in self.peers
        }
        return asdict(self) | {"shares": shares}


@dataclass(frozen=True)
class Report:
    """Everything measured in one run."""

    model: str
    format: str
    parameters: int
    weight_bytes: int  # that a decode step reads
    bits: float  # per weight of the layers' matrices
    device: str
    backends: tuple[str, ...]  # of the matrices, the most frequent first
    threads: int
    load_seconds: float  # includes making random weights
    first_token_seconds: float | None  # from the start of the process
    peak_memory: int  # bytes
    bandwidth: float  # bytes/s of the device
    flops: float  # GEMM operations/s of the device
    rows: tuple[BenchmarkRow, ...]
    system: dict[str, str] = field(default_factory=dict)
    peers: tuple[EngineResult, ...] = ()

    def json(self) -> dict[str, Any]:
        """The report as lists and dicts."""
        return asdict(self, dict_factory=lambda fields: {_JSON_KEYS.get(key, key): v for key, v in fields})


class Comparison(NamedTuple):
    """Engines on one model and device: what `save_comparison_plot` draws of a file that `--json` wrote."""

    model: str
    device: str
    engines: tuple[EngineResult, ...]

    @classmethod
    def from_json(cls, path: Path) -> Comparison:
        """Read `model`, `device` and `peers`; raises BadFile."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            engines = tuple(EngineResult(**engine) for engine in found["peers"])
            if not any(engine.values.get("decode") for engine in engines):
                raise ValueError("no engine has a decode speed")
            return cls(found["model"], found["device"], engines)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadFile(f"{path} holds no comparison by `exlm bench --peers --json`: {error!r}.") from None


def bound(bandwidth: float, flops: float, idle: float, on_gpu: bool) -> str:
    """What bounds the work, judged by its shares of the limits and of idle time."""
    if idle >= BOUND_SHARE:
        return "host"
    if max(bandwidth, flops) >= BOUND_SHARE:
        return "memory" if bandwidth >= flops else "compute"
    return "launch" if on_gpu else "compute"


def require_matplotlib() -> None:
    """Raise MissingExtra without matplotlib; called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A plot needs matplotlib: pip install 'exlm[bench]'.")


def save_comparison_plot(comparisons: Sequence[Comparison], path: Path, dark: bool = False) -> None:
    """Write a PNG or SVG with the decode speed of the engines, one panel of bars for each comparison."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text, own, other = ("#e6edf3", "#6ea8fe", "#57606a") if dark else ("#1f2328", "#3b5bdb", "#b9c0cb")
    panels = [
        [(one.engine, median(one.values["decode"])) for one in comparison.engines if one.values.get("decode")]
        for comparison in comparisons
    ]
    with matplotlib.rc_context({"font.size": 10, "svg.hashsalt": "exlm", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.0, 0.5 + sum(0.75 + 0.36 * len(rows) for rows in panels)), layout="constrained")
        FigureCanvasAgg(figure)
        heights = [len(rows) for rows in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axis, (model, device, _), rows in zip(axes, comparisons, panels, strict=True):
            names, speeds = [name for name, _ in rows], [speed for _, speed in rows]
            colors = [own if name.startswith("exlm") else other for name in names]
            bars = axis.barh(names, speeds, color=colors, height=0.72)
            axis.bar_label(bars, fmt="{:,.0f}", padding=4, color=text)
            axis.set_title(f"{model}, {device}: decode, tokens/s", loc="left", color=text, fontsize=10)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.12 * max(speeds))
            axis.xaxis.set_visible(False)
            axis.tick_params(axis="y", length=0, colors=text)
            for side in axis.spines.values():
                side.set_visible(False)
            axis.patch.set_alpha(0)
        figure.savefig(path, dpi=144, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def save_plot(report: Report, path: Path) -> None:
    """Write a PNG with the speed of every row, and its share of the machine's limits."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.tokens_per_second is not None]
    names = [f"{row.work} {row.cache}\n{row.batch} × {row.context}" for row in rows]
    figure = Figure(figsize=(max(6.0, 1.1 * len(rows)), 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    rates, shares = figure.subplots(2, 1, sharex=True)
    bars = rates.bar(names, [row.tokens_per_second or 0.0 for row in rows], color="#4c72b0")
    rates.bar_label(bars, fmt="{:,.0f}")
    rates.set_yscale("log")
    rates.set_ylabel("tokens / s")
    rates.set_title(f"{report.model}, {report.format} {report.bits:.2f} bit, {report.device}")
    places = range(len(rows))
    shares.bar([x - 0.2 for x in places], [100 * r.bandwidth_share for r in rows], 0.4, label="of bandwidth")
    shares.bar([x + 0.2 for x in places], [100 * r.flops_share for r in rows], 0.4, label="of products")
    shares.set_ylabel("% of the machine's limit")
    shares.legend()
    figure.savefig(path, format="png", dpi=120)
