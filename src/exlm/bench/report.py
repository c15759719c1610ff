"""The results of a benchmark as plain data, JSON and a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MissingExtra

BOUND_SHARE = 0.4
"""From this share of a limit on the work counts as bound by it."""


@dataclass(frozen=True)
class Row:
    """One measurement; shares are between 0 and 1."""

    work: str  # "prompt", "decode", or "ngram": decode with n-gram speculation
    cache: str
    context: int  # tokens in the cache half way through the timed steps; the length of a prompt
    batch: int
    rate: float | None = None  # tokens/s of all rows together; None if the cache does not fit
    step: float = 0.0  # seconds
    read: int = 0  # bytes of weights and KV cache that a step must read
    bandwidth: float = 0.0  # share of the memory bandwidth
    products: float = 0.0  # share of the GEMM throughput
    idle: float = 0.0  # share of a step spent outside forward passes
    bound: str = "does not fit"
    each: float = 1.0  # tokens per row and step


@dataclass(frozen=True)
class Peer:
    """The metrics of one engine, one value for each turn."""

    engine: str
    values: dict[str, list[float]]


@dataclass(frozen=True)
class Report:
    """Everything measured in one run."""

    model: str
    form: str
    parameters: int
    weights: int  # bytes of them that a decode step reads
    bits: float  # per weight of the layers' matrices
    device: str
    backends: tuple[str, ...]  # of the matrices, the most frequent first
    threads: int
    load: float  # seconds; includes making random weights
    first: float | None  # seconds from the start of the process to the first token
    memory: int  # peak, in bytes
    bandwidth: float  # bytes/s of the device
    products: float  # GEMM operations/s of the device
    rows: tuple[Row, ...]
    system: dict[str, str] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()

    def json(self) -> dict[str, Any]:
        """The report as lists and dicts."""
        return asdict(self)


def bound(bandwidth: float, products: float, idle: float, on_gpu: bool) -> str:
    """What bounds the work, judged by its shares of the limits and of idle time."""
    if idle >= BOUND_SHARE:
        return "host"
    if max(bandwidth, products) >= BOUND_SHARE:
        return "memory" if bandwidth >= products else "compute"
    return "launch" if on_gpu else "compute"


def require_matplotlib() -> None:
    """Raise MissingExtra without matplotlib; called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A plot needs matplotlib: pip install 'exlm[bench]'.")


def save_plot(report: Report, path: Path) -> None:
    """Write a PNG with the speed of every row, and its share of the machine's limits."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.rate is not None]
    names = [f"{row.work} {row.cache}\n{row.batch} × {row.context}" for row in rows]
    figure = Figure(figsize=(max(6.0, 1.1 * len(rows)), 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    rates, shares = figure.subplots(2, 1, sharex=True)
    bars = rates.bar(names, [row.rate or 0.0 for row in rows], color="#4c72b0")
    rates.bar_label(bars, fmt="{:,.0f}")
    rates.set_yscale("log")
    rates.set_ylabel("tokens / s")
    rates.set_title(f"{report.model}, {report.form} {report.bits:.2f} bit, {report.device}")
    places = range(len(rows))
    shares.bar([x - 0.2 for x in places], [100 * r.bandwidth for r in rows], 0.4, label="of bandwidth")
    shares.bar([x + 0.2 for x in places], [100 * r.products for r in rows], 0.4, label="of products")
    shares.set_ylabel("% of the machine's limit")
    shares.legend()
    figure.savefig(path, format="png", dpi=120)
