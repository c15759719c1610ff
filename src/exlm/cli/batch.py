"""`exlm batch`: a file of requests in the OpenAI batch format, answered by a model on this machine."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from exlm import Generator, InputError

if TYPE_CHECKING:
    from exlm.batch import Journal, Progress, Rows
    from exlm.serve import Listing

Input = Annotated[
    Path, typer.Argument(metavar="IN.jsonl", help="Requests, one on each line, as for OpenAI's batches.")
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT.jsonl", help="The answers, in the same order. It appears at the end.")
]
Model = Annotated[
    str | None, typer.Option(help="A folder, a .gguf file or owner/name on the Hub; a small one if left out.")
]
Name = Annotated[str | None, typer.Option(help="What requests call the model; else its file's name.")]
Lora = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FOLDER", help="An adapter for requests to name.")
]
MaxSeqLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together.")]
CacheTokens = Annotated[int | None, typer.Option(help="Room that all requests share.")]
CacheType = Annotated[str, typer.Option(help="fp16, q8, q6, q4 or fp8.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Draft = Annotated[str | None, typer.Option(help="A smaller model that guesses ahead, or ngram.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Sequences that run at once.")]
Quiet = Annotated[bool, typer.Option("-q", help="No progress, no figures.")]


def batch(
    source: Input,
    target: Output,
    model: Model = None,
    name: Name = None,
    lora: Lora = None,
    max_seq_len: MaxSeqLen = None,
    cache_tokens: CacheTokens = None,
    cache_type: CacheType = "fp16",
    device: Device = None,
    dtype: Dtype = None,
    draft: Draft = None,
    max_batch_size: MaxBatchSize = None,
    quiet: Quiet = False,
) -> None:
    """Answer a file of requests. If it is stopped, by whatever, the same command goes on from there."""
    from exlm import serve
    from exlm.batch import Journal, answers, read_rows, write_answers

    listing = serve.Listing(
        name or ("default" if model is None else Path(model).name.removesuffix(".gguf") or "default"),
        model,
        max_seq_len=max_seq_len,
        cache_tokens=cache_tokens,
        cache_type=cache_type,
        device=device,
        dtype=dtype,
        draft=draft,
        max_batch_size=max_batch_size,
        loras=_adapters(lora),
    )
    console = Console(stderr=True, quiet=quiet, soft_wrap=True)
    rows = read_rows(source)
    beside = target.with_name(target.name + ".journal")
    if target.exists() and (not target.is_file() or target.samefile(source)):
        raise InputError(f"{target} is not a file to write answers to: name another.")
    if target.exists() and not answers(target, rows, listing.name):
        raise InputError(f"{target} is there already, and holds something else: move it away.")
    if target.exists() and not beside.exists():
        console.print(f"{target} has every answer already. To run the batch again, delete it.")
        return
    with closing(Journal(beside, _facts(listing, rows), len(rows.rows), created=int(time.time()))) as journal:
        if len(journal.done) < len(rows.rows):
            _run(listing, rows, journal, console)
        write_answers(target, journal, rows)
        journal.remove()


def _run(listing: Listing, rows: Rows, journal: Journal, console: Console) -> None:
    """Answer what is not answered yet."""
    from exlm.batch import run_rows
    from exlm.serve import Host, load

    if journal.done:
        console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done already.")
    loaded = load(listing, progress=not console.quiet)
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
    host = Host(
        name=listing.name,
        tokenizer=loaded.tokenizer,
        length=min(generator.max_seq_len, generator.max_total_tokens),
        vocab=loaded.model.config.vocab_size,
        loras=loaded.loras,
        drafts=generator.num_draft_tokens > 0,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    started = time.perf_counter()
    with Bars(*columns, console=console, disable=console.quiet) as bars:
        bar = bars.add_task("Rows", total=len(rows.rows), completed=len(journal.done), told="")

        def tell(progress: Progress) -> None:
            bars.update(bar, completed=progress.done, told=_figures(progress, started))

        try:
            run_rows(rows, journal, generator, host, told=tell)
        except KeyboardInterrupt:
            console.print(f"{len(journal.done)} of {len(rows.rows)} rows are done; the same command goes on.")
            raise


def _figures(progress: Progress, started: float) -> str:
    speed = progress.new_tokens / max(time.perf_counter() - started, 1e-9)
    errors = f", {progress.errors} errors" if progress.errors else ""
    return f"{speed:.0f} tokens/s{errors}"


def _facts(listing: Listing, rows: Rows) -> dict[str, Any]:
    """What decides the answers, and therefore must not change between runs."""
    return {
        "input": rows.digest,
        "model": listing.path,
        "name": listing.name,
        "max_seq_len": listing.max_seq_len,
        "cache_type": listing.cache_type,
        "dtype": listing.dtype,
        "loras": dict(listing.loras),
    }


def _adapters(given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for one in given or ():
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise InputError(f"--lora takes NAME=FOLDER, found {one!r}.")
        pairs[name] = folder
    return pairs
