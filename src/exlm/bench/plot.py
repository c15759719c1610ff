"""A report as a picture. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import MissingExtra
from .report import Report


def require_matplotlib() -> None:
    """Say what is missing for a picture, before anything is measured that it would show."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A plot needs matplotlib: pip install 'exlm[bench]'.")


def save_plot(report: Report, path: Path) -> None:
    """Write a PNG: tokens a second of every row as bars, and how near each is to the machine's limit."""
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
