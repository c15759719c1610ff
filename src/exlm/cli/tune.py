"""`exlm tune`: search the fastest settings of the GPU kernels for a model, and save them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import exlm
from exlm import InputError
from exlm import bench as benchmark

from .bench import BitsOption, FormOption, ModelArgument, ShapeOption, progress_line


def tune(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    format: FormOption = "exl2",
    bits: BitsOption = None,
    device: Annotated[str | None, typer.Option(help="A GPU, as in cuda or cuda:1.")] = None,
) -> None:
    """Find the fastest kernel settings for a model on this GPU. Takes a few minutes, once.

    Example: exlm tune ./llama-exl2
    """
    if model is not None and shape is not None:
        raise InputError("Name a model or a --shape, not both.")
    path = None if model is None else exlm.find_model(model, progress=True)
    plan = benchmark.BenchmarkConfig(
        model=path, shape=shape or "llama-2-7b", format=format, bits=bits, device=device, prompt=512
    )
    with progress_line() as tell:
        found = benchmark.tune(plan, tell)
    Console().print(_table(found) if found.changes else "The usual settings are the quickest here.")
    if found.file is not None:
        Console().print(
            f"A step takes {found.after / found.before:.1%} of what it took. Kept in {found.file}."
        )


def _table(found: benchmark.TuningResult) -> Table:
    table = Table(title="tiles, warps, stages", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("inputs / 128 x outputs / 16", "before", "now"):
        table.add_column(name)
    for name, before, after in found.changes:
        table.add_row(name, *(", ".join(map(str, setting)) for setting in (before, after)))
    return table
