"""The quality report beside a model: a card for people, JSON for programs, pictures where matplotlib is."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import MissingExtra
from .evaluate import Quality

log = logging.getLogger(__name__)

JSON_FILE = "quality.json"
PLOT_FILE = "quality.png"


def write_report(folder: Path, quality: Quality, facts: Mapping[str, Any], card: str = "quality.md") -> None:
    """Write the card and quality.json into a folder, and quality.png where matplotlib is installed."""
    drawn = True
    try:
        plot(quality, folder / PLOT_FILE)
    except MissingExtra as reason:
        log.info("no plots: %s", reason)
        drawn = False
    table = {"quality": quality.to_json(), "made_with": dict(facts)}
    (folder / JSON_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    (folder / card).write_text(markdown(quality, facts, drawn), encoding="utf-8")


def markdown(q: Quality, facts: Mapping[str, Any], drawn: bool) -> str:
    """The card."""
    lines = [f"# {q.model}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Quality", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in q.figures()]
    lines += ["", "## Layers", "", "| layer | bits a weight | error behind it |", "|---|---|---|"]
    for i, bits in enumerate(q.layer_bits):
        error = f"{q.layer_errors[i]:.4f}" if q.layer_errors else "–"
        lines.append(f"| {i} | {bits:.2f} | {error} |")
    if drawn:
        lines += ["", f"![Bits and errors of the layers]({PLOT_FILE})"]
    return "\n".join(lines) + "\n"


def plot(q: Quality, path: Path) -> None:
    """Bits and errors of each layer as a picture."""
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtra("Plots need matplotlib: pip install 'exlm[bench]'") from error
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.bar(range(len(q.layer_bits)), q.layer_bits, color="#b8c7d9")
    axes.set_xlabel("layer")
    axes.set_ylabel("bits a weight")
    if q.layer_errors:
        twin = axes.twinx()
        twin.plot(range(len(q.layer_errors)), q.layer_errors, color="#b3402a", marker=".")
        twin.set_ylabel("relative error behind the layer")
        twin.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
