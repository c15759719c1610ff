"""`exlm bench` measures a model end to end and the machine's limits; `exlm tune` searches kernel settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import exlm
from exlm import InputError
from exlm import bench as benchmark
from exlm.bench.shapes import FORMATS, SHAPES

from .info import format_bytes

_METRICS = {
    "prompt": "prompt of 512, tok/s",
    "decode": "decode, tok/s",
    "batch": "decode of 8, tok/s",
    "first": "to first token, s",
    "peak": "peak memory, MB",
}
_LOWER_IS_BETTER = ("first", "peak")


class _Defaults(NamedTuple):
    """The options that depend on the device and the size of the model."""

    batches: str
    contexts: str
    prompt: int
    tokens: int


_TINY_DEFAULTS = _Defaults("1,4", "32", 128, 16)
_CPU_DEFAULTS = _Defaults("1,8", "32", 512, 64)
_GPU_DEFAULTS = _Defaults("1,8,32,64", "512,8000", 2048, 256)

ModelArgument = Annotated[
    str | None, typer.Argument(help="A folder, a .gguf file or a Hub name; random weights if left out.")
]
ShapeOption = Annotated[str | None, typer.Option(help=f"Sizes of the random weights: {', '.join(SHAPES)}.")]
FormatOption = Annotated[str, typer.Option(help=f"Format of the random weights: {', '.join(FORMATS)}.")]
BitsOption = Annotated[
    float | None, typer.Option(help="Bits per random weight; 4.1 for exl2, 4 for gptq, 4.5 for gguf.")
]


def bench(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    format: FormatOption = "exl2",
    bits: BitsOption = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes at the first context, as in 1,8,32,64.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Context lengths at the first batch size, as in 512,8000.")
    ] = None,
    cache: Annotated[str, typer.Option(help="Cache types: fp16, fp8, q8, q6, q4, with commas between.")] = "fp16",
    prompt: Annotated[int | None, typer.Option(min=1, help="Length of the prompt that is timed, in tokens.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to decode for each sequence.")] = None,
    draft: Annotated[str | None, typer.Option(help="ngram: also time n-gram speculation, on repetitive text.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Compare with other engines on the CPU.")] = False,
    peer: Annotated[
        list[str] | None, typer.Option(help="The interpreter of an engine: llama.cpp=/venv/bin/python.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Runs of each engine, in turn.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results as this PNG file; needs matplotlib.")] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: --plot the engines of a file that --json wrote."),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="With --from: for a dark background.")] = False,
) -> None:
    """Measure loading, prompt and decode speed at several batch sizes, context lengths and cache types.

    Example: exlm bench --shape llama-3-8b --batch 1,8,32 --cache fp16,q4
    """
    import torch

    if draft not in (None, "ngram"):
        raise InputError(f"--draft must be ngram, found {draft!r}.")
    _check_files(json_file, plot)
    if results:
        if plot is None:
            raise InputError("--from draws results: name the file to draw with --plot.")
        benchmark.save_comparison_plot([benchmark.Comparison.from_json(file) for file in results], plot, dark)
        return
    interpreters = _parse_peers(peer or [])
    if threads is not None:
        torch.set_num_threads(threads)
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    if peers and not on_cpu:
        raise InputError("--peers compares engines on the CPU: use --device cpu.")
    path = exlm.find_model(model, progress=True) if model is not None or (peers and shape is None) else None
    if path is not None and shape is not None:
        raise InputError("Name a model or a --shape, not both; --peers needs a model that is in files.")
    defaults = _defaults_for(shape, on_cpu, path)
    config = benchmark.BenchmarkConfig(
        model=path,
        shape=shape or ("smollm2-135m" if on_cpu else "llama-2-7b"),
        format=format,
        bits=bits,
        device=device,
        batches=_parse_ints("--batch", batch or defaults.batches),
        contexts=_parse_ints("--context", context or defaults.contexts),
        caches=tuple(cache.split(",")),
        prompt=prompt or defaults.prompt,
        tokens=tokens or defaults.tokens,
        ngram=draft == "ngram",
    )
    console = Console() if Console().is_terminal else Console(width=110)
    with _progress_line() as on_progress:
        report = benchmark.run(config, on_progress)
    console.print(_table(report))
    if peers and path is not None:
        report = _compare_with_peers(console, report, path, turns, interpreters)
    if json_file is not None:
        json_file.write_text(json.dumps(report.json(), indent=1))
    if plot is not None:
        benchmark.save_plot(report, plot)


def _defaults_for(shape: str | None, on_cpu: bool, path: Path | None) -> _Defaults:
    """The defaults for a device and a model; contexts of a model in files are at most its own length."""
    defaults = _TINY_DEFAULTS if shape == "tiny" else _CPU_DEFAULTS if on_cpu else _GPU_DEFAULTS
    if path is None:
        return defaults
    longest = exlm.Config(path).max_seq_len
    contexts = [one for one in defaults.contexts.split(",") if int(one) <= longest] or [str(longest)]
    return defaults._replace(contexts=",".join(contexts), prompt=min(defaults.prompt, longest))


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    """Refuse output files that cannot be written, before minutes are spent on measuring."""
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InputError(f"{option} {file} cannot be written: name a file in a folder that is there.")
    if plot is not None:
        benchmark.require_matplotlib()


def _parse_ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} must be whole numbers with commas between, found {text!r}.") from None


@contextmanager
def _progress_line() -> Iterator[Callable[[str, int, int], object]]:
    """A progress line that is redrawn only when something changes.

    Rich's usual ten redraws a second would take CPU time from what is being measured.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total, refresh=True)

        yield on_progress


def _table(report: benchmark.Report) -> Table:
    """The results, one line for each measurement."""
    facts = f"{report.parameters / 1e9:.2f} billion parameters, {report.format} {report.bits:.2f} bit"
    where = report.device if report.device != "CPU" else f"CPU, threads: {report.threads}"
    title = f"{report.model}, {facts}, on {where} ({', '.join(report.backends)})"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("work", "cache"):
        table.add_column(name, no_wrap=True)
    for name in ("context", "rows", "tok/s", "ms", "tok", "read", "of copy", "of GEMM", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for row in report.rows:
        table.add_row(*_row_cells(row))
    seconds = report.first_token_seconds
    first = "" if seconds is None else f", first token {seconds:.1f} s after the process began"
    limits = f"{report.bandwidth / 1e9:,.1f} GB/s copied, {report.flops / 1e12:,.2f} TFLOP/s multiplied"
    loaded = f"loaded in {report.load_seconds:.2f} s{first}; {format_bytes(report.peak_memory)} at most"
    table.caption = f"{loaded}; limits: {limits}"
    return table


def _row_cells(row: benchmark.BenchmarkRow) -> list[str]:
    shape = [row.work, row.cache, str(row.context), str(row.batch)]
    rate, step, tokens = row.tokens_per_second, row.step_seconds, row.tokens_per_row_step
    if rate is None:
        return [*shape, *[""] * 7, row.bound]
    speed = [f"{rate:,.{int(rate < 1000)}f}", f"{1e3 * step:.{3 if step < 0.01 else 1}f}"]
    speed += [f"{tokens:.{int(tokens < 100)}f}", format_bytes(row.bytes_read)]
    shares = (row.bandwidth_share, row.flops_share, row.idle_share)
    return [*shape, *speed, *(f"{share:.0%}" for share in shares), row.bound]


def _parse_peers(values: list[str]) -> dict[str, str]:
    """Parse --peer into the interpreter of each engine."""
    interpreters = dict(one.split("=", 1) for one in values if "=" in one)
    if len(interpreters) != len(values):
        raise InputError("--peer must be an engine and its interpreter, as in llama.cpp=/venv/bin/python.")
    return interpreters


def _compare_with_peers(
    console: Console, report: benchmark.Report, path: Path, turns: int, interpreters: dict[str, str]
) -> benchmark.Report:
    """Run the other engines, print the comparison, and add it to the report."""
    with _progress_line() as on_progress:
        peers, skipped = benchmark.compare(path, report.threads, turns, interpreters, on_progress)
    for reason in skipped:
        console.print(f"left out: {reason}", soft_wrap=True)
    if peers:
        console.print(_peer_table(peers, report.threads, turns))
    return replace(report, peers=tuple(peers))


def _peer_table(peers: list[benchmark.EngineResult], threads: int, turns: int) -> Table:
    """Medians with their range, and by which factor the first engine is better."""
    exlm_result = peers[0]
    title = f"threads: {threads}, medians of {turns} (lowest to highest)"
    table = Table(title=f"{title}, × by which {exlm_result.engine} wins")
    table.add_column("engine")
    for name in _METRICS.values():
        table.add_column(name, justify="right")
    for one in peers:
        cells = []
        for key in _METRICS:
            values, base = one.values.get(key), exlm_result.values.get(key)
            if not values or not base:
                cells.append("")
                continue
            digits = 1 if key == "first" else 0
            better = median(base) / median(values)
            ratio = "" if one is exlm_result else f"\n{1 / better if key in _LOWER_IS_BETTER else better:.2f} ×"
            low, high = min(values), max(values)
            cells.append(f"{median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f}){ratio}")
        table.add_row(one.engine, *cells)
    return table


def tune(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    format: FormatOption = "exl2",
    bits: BitsOption = None,
    device: Annotated[str | None, typer.Option(help="A GPU, as in cuda or cuda:1.")] = None,
) -> None:
    """Find the fastest kernel settings for a model on this GPU. Takes a few minutes, once.

    Example: exlm tune ./llama-exl2
    """
    if model is not None and shape is not None:
        raise InputError("Name a model or a --shape, not both.")
    path = None if model is None else exlm.find_model(model, progress=True)
    config = benchmark.BenchmarkConfig(
        model=path, shape=shape or "llama-2-7b", format=format, bits=bits, device=device, prompt=512
    )
    with _progress_line() as on_progress:
        found = benchmark.tune(config, on_progress)
    Console().print(_tuning_table(found) if found.changes else "The default settings are the fastest here.")
    if found.file is not None:
        Console().print(f"A step takes {found.after / found.before:.1%} of the time before. Saved in {found.file}.")


def _tuning_table(found: benchmark.TuningResult) -> Table:
    table = Table(title="tiles, warps, stages", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("inputs / 128 x outputs / 16", "before", "now"):
        table.add_column(name)
    for name, before, after in found.changes:
        table.add_row(name, *(", ".join(map(str, setting)) for setting in (before, after)))
    return table
