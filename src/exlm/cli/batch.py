"""`exlm batch`: answer a file of requests in the OpenAI batch format, on this machine or a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars

import exlm
from exlm import InputError

from .model_options import (
    MODEL_HELP,
    Gpus,
    ModelOptions,
    Ray,
    Replicas,
    cluster_config,
    refuse_without_ray,
    with_model_options,
)

if TYPE_CHECKING:
    from exlm.batch import Journal, Progress, Rows
    from exlm.scale import ClusterConfig
    from exlm.serve import ModelSpec

Input = Annotated[
    str, typer.Argument(metavar="IN.jsonl", help="Requests in the format of OpenAI's batches, one a line.")
]
Output = Annotated[
    str, typer.Argument(metavar="OUT.jsonl", help="Where to write the answers, in the same order, when all are done.")
]
Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")]


@with_model_options
def batch(
    source: Input,
    target: Output,
    model: Model = None,
    *,
    model_options: ModelOptions,
    ray: Ray = False,
    replicas: Replicas = "1",
    gpus: Gpus = None,
    quiet: Quiet = False,
) -> None:
    """Answer a file of requests. After an interruption the same command continues where it stopped.

    Example: exlm batch requests.jsonl answers.jsonl --model ./llama.gguf
    """
    refuse_without_ray(ray, replicas, gpus)
    model_spec = model_options.main_model(model)
    console = Console(stderr=True, quiet=quiet, soft_wrap=True)
    if ray:
        make_config = partial(cluster_config, replicas, gpus, model_spec.device)
        _run_on_ray(source, target, model_spec, make_config, console)
    else:
        _run_locally(Path(source), Path(target), model_spec, console)


def _run_locally(source: Path, target: Path, model_spec: ModelSpec, console: Console) -> None:
    """Answer a file without Ray, keeping a journal beside the output until it is complete."""
    from exlm.batch import is_answered, read_rows, write_answers

    rows = read_rows(source)
    journal_path = target.with_name(target.name + ".journal")
    if target.exists() and (not target.is_file() or target.samefile(source)):
        raise InputError(f"{target} is not a file to write answers to: name another.")
    if target.exists() and not is_answered(target, rows, model_spec.name):
        raise InputError(f"{target} exists already, and holds something else: move it away.")
    if target.exists() and not journal_path.exists():
        console.print(f"{target} has every answer already. To run the batch again, delete it.")
        return
    with _open_journal(journal_path, model_spec, rows) as journal:
        if len(journal.done) < len(rows.rows):
            _run_rows(model_spec, rows, journal, console)
        write_answers(target, journal, rows)
        journal.remove()


def _run_rows(model_spec: ModelSpec, rows: Rows, journal: Journal, console: Console) -> None:
    """Answer the rows that the journal does not have yet."""
    from exlm.batch import run_rows
    from exlm.serve import ModelInfo, load

    loaded = load(model_spec, progress=not console.quiet)
    generator = exlm.Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
    model_info = ModelInfo.from_generator(model_spec.name, generator, loaded.loras)
    with _progress_bar(rows, journal, console) as on_progress:
        run_rows(rows, journal, generator, model_info, on_progress=on_progress)


def _run_on_ray(
    source: str, target: str, model_spec: ModelSpec, make_cluster_config: Callable[[], ClusterConfig], console: Console
) -> None:
    """Answer the requests in a file, a table or an object store, and write the answers to another."""
    from exlm.batch import is_answered
    from exlm.scale import (
        cluster,
        exists,
        import_ray,
        is_remote,
        read_requests,
        run_rows_on_ray,
        write_answers_anywhere,
    )

    import_ray("data")
    rows = read_requests(source)
    journal_path = Path(f"{Path(target).name if is_remote(target) else target}.journal")
    if exists(target) and not journal_path.exists():
        if is_remote(target) or not is_answered(Path(target), rows, model_spec.name):
            raise InputError(f"{target} exists already: move it away.")
        console.print(f"{target} has every answer already. To run the batch again, delete it.")
        return
    with _open_journal(journal_path, model_spec, rows) as journal:
        if len(journal.done) < len(rows.rows):
            with _progress_bar(rows, journal, console) as on_progress, cluster():
                run_rows_on_ray(rows, journal, model_spec, make_cluster_config(), on_progress)
        write_answers_anywhere(target, journal, rows)
        journal.remove()


@contextmanager
def _progress_bar(rows: Rows, journal: Journal, console: Console) -> Iterator[Callable[[Progress], object]]:
    """A progress bar, as the function that updates it; Ctrl-C prints how to continue."""
    if journal.done:
        console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done already.")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[throughput]}"),
    )
    started = time.perf_counter()
    with ProgressBars(*columns, console=console, disable=console.quiet) as progress_bar:
        task = progress_bar.add_task("Rows", total=len(rows.rows), completed=len(journal.done), throughput="")

        def on_progress(progress: Progress) -> None:
            progress_bar.update(task, completed=progress.done, throughput=_throughput(progress, started))

        try:
            yield on_progress
        except KeyboardInterrupt:
            console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done; the same command goes on.")
            raise


def _throughput(progress: Progress, started: float) -> str:
    speed = progress.new_tokens / max(time.perf_counter() - started, 1e-9)
    errors = f", {progress.errors} errors" if progress.errors else ""
    return f"{speed:.0f} tokens/s{errors}"


def _open_journal(path: Path, model_spec: ModelSpec, rows: Rows) -> closing[Journal]:
    """The journal of a run; one that another model or input wrote is refused."""
    from exlm.batch import Journal

    run_identity = {
        "input": rows.sha256,
        "model": model_spec.path,
        "name": model_spec.name,
        "max_seq_len": model_spec.max_seq_len,
        "cache_type": model_spec.cache_type,
        "dtype": model_spec.dtype,
        "loras": dict(model_spec.loras),
    }
    return closing(Journal(path, run_identity, len(rows.rows), created=int(time.time())))
