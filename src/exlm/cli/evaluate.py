"""`exlm eval`: measure a model's quality, alone or against the model it was quantised from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import exlm
from exlm import InputError


def eval_(
    model: Annotated[str, typer.Argument(help="A model folder, a .gguf file, or a name on the Hub.")],
    against: Annotated[str | None, typer.Option(help="The model it was quantised from.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A .txt, .jsonl or .parquet file; default: built-in text.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="With --text: number of rows; default 16.")] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="With --text: tokens per row; default 512, or the model's context."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    speed: Annotated[bool, typer.Option(help="Also measure the speed.")] = True,
    report: Annotated[Path | None, typer.Option(help="Write a report to this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")] = False,
) -> None:
    """Measure perplexity; with --against also KL divergence, agreement and the error of every layer.

    Example: exlm eval ./llama-exl2 --against ./llama
    """
    if text is None and (rows, length) != (None, None):
        raise InputError("--rows and --length go with --text: the built-in text is read whole.")
    try:
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--report {report} is no folder that can be made: {error}.") from None
    path = exlm.find_model(model, progress=not quiet)
    other = None if against is None else exlm.find_model(against, progress=not quiet)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("Reading", total=None)
        quality = exlm.evaluate_model(
            path,
            other,
            text=text,
            rows=rows or 16,
            length=length,
            device=device,
            speed=speed,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if report is not None:
        exlm.write_report(report, quality, {"text": str(text or "built-in")})
    if as_json:
        typer.echo(json.dumps(quality.to_json(), indent=2))
    else:
        print_quality(quality)


def print_quality(quality: exlm.Quality) -> None:
    """Print the results as a table, then the layers."""
    console = Console()
    table = Table(show_header=False, box=None)
    for name, value in quality.figures():
        table.add_row(name, value)
    console.print(table)
    layers = Table("layer", "bits", "error", box=None)
    for i, bits in enumerate(quality.layer_bits):
        error = "" if quality.layer_errors is None else f"{quality.layer_errors[i]:.4f}"
        layers.add_row(str(i), f"{bits:.2f}", error)
    console.print(layers)
