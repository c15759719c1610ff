"""`exlm batch`: answer a file of requests in the OpenAI batch format with a model on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

import exlm
from exlm import InputError

from .cluster import Gpus, Ray, Replicas, batch_on_ray, cluster_shape, refuse_without_ray
from .model_options import MODEL_HELP, ModelOptions, with_model_options

if TYPE_CHECKING:
    from exlm.batch import Journal, Progress, Rows
    from exlm.scale import ClusterConfig
    from exlm.serve import ModelSpec

Input = Annotated[
    str, typer.Argument(metavar="IN.jsonl", help="Requests in the format of OpenAI's batches, one a line.")
]
Output = Annotated[
    str,
    typer.Argument(
        metavar="OUT.jsonl", help="Where to write the answers, in the same order, when all are done."
    ),
]
Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")]


@with_model_options
def batch(
    source: Input,
    target: Output,
    model: Model = None,
    *,
    hosting: ModelOptions,
    ray: Ray = False,
    replicas: Replicas = "1",
    gpus: Gpus = None,
    quiet: Quiet = False,
) -> None:
    """Answer a file of requests. After an interruption the same command continues where it stopped.

    Example: exlm batch requests.jsonl answers.jsonl --model ./llama.gguf
    """
    refuse_without_ray(ray, replicas, gpus)
    listing = hosting.listing(model)
    console = Console(stderr=True, quiet=quiet, soft_wrap=True)
    if not ray:
        _answer_locally(Path(source), Path(target), listing, console)
        return

    def shape() -> ClusterConfig:
        return cluster_shape(replicas, gpus, listing.device)

    batch_on_ray(source, target, listing, shape, _run_identity, _with_progress_bar, console)


def _answer_locally(source: Path, target: Path, listing: ModelSpec, console: Console) -> None:
    """Answer a file without Ray, keeping a journal beside the output until it is complete."""
    from exlm.batch import Journal, is_answered, read_rows, write_answers

    rows = read_rows(source)
    journal_path = target.with_name(target.name + ".journal")
    if target.exists() and (not target.is_file() or target.samefile(source)):
        raise InputError(f"{target} is not a file to write answers to: name another.")
    if target.exists() and not is_answered(target, rows, listing.name):
        raise InputError(f"{target} is there already, and holds something else: move it away.")
    if target.exists() and not journal_path.exists():
        console.print(f"{target} has every answer already. To run the batch again, delete it.")
        return
    with closing(
        Journal(journal_path, _run_identity(listing, rows), len(rows.rows), created=int(time.time()))
    ) as journal:
        if len(journal.done) < len(rows.rows):
            _run(listing, rows, journal, console)
        write_answers(target, journal, rows)
        journal.remove()


def _run(listing: ModelSpec, rows: Rows, journal: Journal, console: Console) -> None:
    """Answer the rows that the journal does not have yet."""
    from exlm.batch import run_rows
    from exlm.serve import ModelInfo, load

    loaded = load(listing, progress=not console.quiet)
    generator = exlm.Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
    host = ModelInfo(
        name=listing.name,
        tokenizer=loaded.tokenizer,
        max_seq_len=generator.max_sequence_length(),
        max_guided_len=generator.max_sequence_length(2),
        vocab_size=loaded.model.config.vocab_size,
        loras=loaded.loras,
        has_draft=generator.num_draft_tokens > 0,
    )
    _with_progress_bar(
        rows, journal, console, lambda tell: run_rows(rows, journal, generator, host, on_progress=tell)
    )


def _with_progress_bar(
    rows: Rows, journal: Journal, console: Console, work: Callable[[Callable[[Progress], object]], object]
) -> None:
    """Run `work`, which reports its progress, under a progress bar."""
    if journal.done:
        console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done already.")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    started = time.perf_counter()
    with Bars(*columns, console=console, disable=console.quiet) as progress_bar:
        task = progress_bar.add_task("Rows", total=len(rows.rows), completed=len(journal.done), told="")

        def on_progress(progress: Progress) -> None:
            progress_bar.update(task, completed=progress.done, told=_throughput(progress, started))

        try:
            work(on_progress)
        except KeyboardInterrupt:
            console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done; the same command goes on.")
            raise


def _throughput(progress: Progress, started: float) -> str:
    speed = progress.new_tokens / max(time.perf_counter() - started, 1e-9)
    errors = f", {progress.errors} errors" if progress.errors else ""
    return f"{speed:.0f} tokens/s{errors}"


def _run_identity(listing: ModelSpec, rows: Rows) -> dict[str, Any]:
    """What the answers depend on: a journal is only continued by a run with the same values."""
    return {
        "input": rows.sha256,
        "model": listing.path,
        "name": listing.name,
        "max_seq_len": listing.max_seq_len,
        "cache_type": listing.cache_type,
        "dtype": listing.dtype,
        "loras": dict(listing.loras),
    }
