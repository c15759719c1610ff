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
from exlm.bench.shapes import FORMATS, MIXES, SHAPES

from .bench_mixes import mix_table, print_builds
from .info import format_bytes

_METRICS = {
    "prompt": "prompt of 512, tok/s",
    "decode": "decode, tok/s",
    "batch": "decode of 8, tok/s",
    "first": "to first token, s",
    "peak": "peak memory, MB",
}
_LOWER_IS_BETTER = ("first", "peak")

BUSY_LOAD = 0.5
"""Load average before the start from which `--mix` warns that other programs disturb it."""


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
    threads: Annotated[
        str | None, typer.Option(help="Number of CPU threads, or several to measure one after the other: 1,2,4.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Compare with other engines on the CPU.")] = False,
    peer: Annotated[
        list[str] | None, typer.Option(help="The interpreter of an engine: llama.cpp=/venv/bin/python.")
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(help=f"With --shape and --format gguf: files with the types of these mixes: {', '.join(MIXES)}."),
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
    thread_counts = _parse_ints("--threads", threads) if threads is not None else (torch.get_num_threads(),)
    if min(thread_counts) < 1:
        raise InputError(f"--threads must be at least 1, found {threads}.")
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    if peers and not on_cpu:
        raise InputError("--peers compares engines on the CPU: use --device cpu.")
    if mix is not None or (peers and shape is not None):
        ignored: dict[str, object] = {
            "--bits": bits,
            "--batch": batch,
            "--context": context,
            "--prompt": prompt,
            "--tokens": tokens,
        }
        ignored |= {"--draft": draft, "--plot": plot}
        mixes = _mixes(mix, model, shape, format, on_cpu, [name for name, value in ignored.items() if value])
        _bench_mixes(str(shape), mixes, thread_counts, turns, interpreters, peers, json_file)
        return
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
    console = _console()
    reports: list[benchmark.Report] = []
    for count in thread_counts:
        torch.set_num_threads(count)
        with _progress_line() as on_progress:
            report = benchmark.run(config, on_progress)
        if reports:  # the process is older than this measurement
            report = replace(report, first_token_seconds=None)
        console.print(_table(report))
        if peers and path is not None:
            report = _compare_with_peers(console, report, path, turns, interpreters)
        reports.append(report)
    if len(reports) > 1:
        console.print(_curve_table(reports))
    if json_file is not None:
        curve = {"curve": [one.json() for one in reports]} if len(reports) > 1 else {}
        json_file.write_text(json.dumps(reports[0].json() | curve, indent=1))
    if plot is not None:
        benchmark.save_plot(reports[0], plot)


def _console() -> Console:
    return Console() if Console().is_terminal else Console(width=120)


def _mixes(
    mix: str | None, model: str | None, shape: str | None, format: str, on_cpu: bool, ignored: list[str]
) -> list[benchmark.Mix]:
    """The mixes that --mix names, of --shape; q4_k_m if --peers alone asks for a file."""
    if model is not None or shape is None:
        raise InputError("--mix writes files of random weights: name a --shape and no model.")
    if shape not in SHAPES:
        raise InputError(f"--shape must be one of {', '.join(SHAPES)}, found {shape!r}.")
    if format != "gguf":
        raise InputError("Engines are compared on GGUF files: add --format gguf, and --mix with the mixes of types.")
    if not on_cpu:
        raise InputError("--mix measures on the CPU: use --device cpu.")
    if ignored:
        raise InputError(f"{', '.join(ignored)} and --mix do not combine: its prompts and answers have fixed lengths.")
    return [benchmark.Mix(name.strip().lower(), SHAPES[shape]) for name in (mix or "q4_k_m").split(",")]


def _bench_mixes(
    shape: str,
    mixes: list[benchmark.Mix],
    thread_counts: tuple[int, ...],
    turns: int,
    interpreters: dict[str, str],
    peers: bool,
    json_file: Path | None,
) -> None:
    """Measure every mix, print a table for each as soon as it is there, and write the JSON file after each."""
    console = _console()
    only = ("exlm", "llama.cpp") if peers else ("exlm",)
    found: list[benchmark.MixResult] = []
    load = benchmark.load_average()
    if load is not None and load > BUSY_LOAD:
        console.print(
            f"The load average is {load:.1f}: other programs use the processor, and only ratios mean something.",
            soft_wrap=True,
        )
    with _progress_line() as on_progress:
        results = benchmark.compare_mixes(mixes, thread_counts, turns, interpreters, on_progress, only=only)
        for result in results:
            found.append(result)
            if len(found) == 1:
                print_builds(console, list(result.peers), interpreters)
            if len(found) % len(thread_counts) == 0:
                for reason in dict.fromkeys(reason for one in found[-len(thread_counts) :] for reason in one.skipped):
                    console.print(f"left out: {reason}", soft_wrap=True)
                console.print(mix_table(found[-len(thread_counts) :]))
            if json_file is not None:
                json_file.write_text(json.dumps(benchmark.mixes_json(shape, turns, load, found), indent=1))


def _curve_table(reports: list[benchmark.Report]) -> Table:
    """The speed of every kind of work with each number of threads, and how many times the first's it is."""
    table = Table(title="tok/s by number of threads", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("work", "cache"):
        table.add_column(name, no_wrap=True)
    for name in ("context", "rows", *(str(report.threads) for report in reports)):
        table.add_column(name, justify="right", no_wrap=True)
    for rows in zip(*(report.rows for report in reports), strict=True):
        one, base = rows[0], rows[0].tokens_per_second
        cells = []
        for row in rows:
            rate = row.tokens_per_second
            ratio = "" if row is one or not base or rate is None else f" ({rate / base:.2f} ×)"
            cells.append("" if rate is None else f"{rate:,.{int(rate < 1000)}f}{ratio}")
        table.add_row(one.work, one.cache, str(one.context), str(one.batch), *cells)
    limits = "; ".join(f"threads {one.threads}: {one.bandwidth / 1e9:,.1f} GB/s" for one in reports)
    table.caption = f"read bandwidth, {limits}"
    return table


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
