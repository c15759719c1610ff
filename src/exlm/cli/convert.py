"""`exlm convert`: rewrite a model in another format, without loss."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import exlm


def convert(
    source: Annotated[str, typer.Argument(help="A model folder, or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[
        str, typer.Option(help="safetensors (formats as they are), dense (plain floats), exl2, gptq or gptq-v2.")
    ] = "safetensors",
    shard_size: Annotated[int, typer.Option(min=1, help="Largest weight file, in MiB.")] = 2048,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress and no result.")] = False,
) -> None:
    """Rewrite a model in another format or container; refused if a single weight would change.

    Example: exlm convert ./llama.Q4_K_M.gguf ./llama-safetensors --to safetensors
    """
    path = exlm.find_model(source, progress=not quiet)
    with _exit_on_sigterm(), _progress_bar(quiet) as on_progress:
        exlm.convert_model(path, target, to, shard_bytes=shard_size * 2**20, overwrite=overwrite, progress=on_progress)
    if not quiet:
        files = [file for file in target.iterdir() if file.is_file()]
        total = sum(file.stat().st_size for file in files) / 2**20
        typer.echo(f"{target}: {len(files)} files, {total:,.1f} MiB")


@contextmanager
def _progress_bar(quiet: bool) -> Iterator[Callable[[int, int], object] | None]:
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Converting", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that unfinished files are removed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
