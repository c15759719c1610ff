"""`exlm quantize` quantises a model; `exlm eval` measures quality, alone or against the source model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import exlm
from exlm import InputError

Rows = Annotated[
    int | None, typer.Option(min=1, help="Rows of calibration text; default 128, fewer for a large model on a CPU.")
]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens per row; default 512, or the model's context.")]
HeadBits = Annotated[int | None, typer.Option(help="Bits per weight of the head: 2, 3, 4, 5, 6 or 8; default 6.")]
GroupSize = Annotated[int | None, typer.Option(help="Rows of a GPTQ group: 32, 64 or 128; default 128.")]


def quantize(
    source: Annotated[str, typer.Argument(help="A model folder, a .gguf file, or a name on the Hub.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    bits: Annotated[
        float | None, typer.Option(help="Bits per weight of the layers, scales included; default 4.0.")
    ] = None,
    head_bits: HeadBits = None,
    size: Annotated[str | None, typer.Option(help="Instead of --bits: size of the weights, as in 5.2GB.")] = None,
    max_kld: Annotated[
        float | None, typer.Option(help="Instead of --bits: largest KL divergence from the source, in nats.")
    ] = None,
    calibration: Annotated[str, typer.Option(help="builtin, or a .txt, .jsonl or .parquet file.")] = "builtin",
    method: Annotated[str, typer.Option(help="exl2, or gptq (4 bit, act-order).")] = "exl2",
    group_size: GroupSize = None,
    rows: Rows = None,
    length: Length = None,
    measurement: Annotated[
        Path | None, typer.Option(help="A measurement to reuse: one of exlm, or exllamav2's measurement.json.")
    ] = None,
    save_measurement: Annotated[Path | None, typer.Option(help="Save the measurement here, for other targets.")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Largest weight file, in MiB.")] = 2048,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an unfinished run instead of resuming it.")
    ] = False,
    report: Annotated[bool, typer.Option(help="Compare the result with its source.")] = True,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress and no report.")] = False,
) -> None:
    """Quantise a model. An interrupted run resumes when the same command is run again.

    Example: exlm quantize ./llama ./llama-exl2 --bits 4.5
    """
    path = exlm.find_model(source, progress=not quiet)
    with _progress_bar(quiet) as on_progress:
        quality = exlm.quantize_model(
            path,
            target,
            bits,
            size=size,
            max_kld=max_kld,
            head_bits=6 if head_bits is None else head_bits,
            method=_check_method(method, group_size, head_bits),
            group_size=128 if group_size is None else group_size,
            calibration=calibration,
            rows=rows,
            length=length,
            measurement=measurement,
            save_measurement=save_measurement,
            device=device,
            shard_bytes=shard_size * 2**20,
            overwrite=overwrite,
            restart=restart,
            report=report,
            progress=on_progress,
        )
    if quality is not None:
        _report_quality(quality, max_kld, quiet)


def _report_quality(quality: exlm.Quality, max_kld: float | None, quiet: bool) -> None:
    if not quiet:
        print_quality(quality)
    if quality.kl is not None and max_kld is not None and quality.kl > max_kld:
        message = f"It diverges by {quality.kl:.3g} from its source; at most {max_kld:g} was asked for."
        typer.echo(message, err=True)
        raise typer.Exit(1)


def _check_method(name: str, group_size: int | None, head_bits: int | None) -> Literal["exl2", "gptq"]:
    """Check the method's name and that the options given apply to it."""
    if name == "exl2":
        if group_size is not None:
            raise InputError("--group-size goes with --method gptq: EXL2 chooses the sizes of its groups.")
        return "exl2"
    if name == "gptq":
        if head_bits is not None:
            raise InputError("--head-bits goes with --method exl2: the head of a GPTQ model stays float.")
        return "gptq"
    raise InputError(f"--method is exl2 or gptq, found {name!r}.")


@contextmanager
def _progress_bar(quiet: bool) -> Iterator[Callable[[int, int, str], object]]:
    if quiet:
        yield lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=f"{what:<24}")


def eval_(
    model: Annotated[str, typer.Argument(help="A model folder, a .gguf file, or a name on the Hub.")],
    against: Annotated[str | None, typer.Option(help="The model it was quantised from.")] = None,
    text: Annotated[Path | None, typer.Option(help="A .txt, .jsonl or .parquet file; default: built-in text.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="With --text: number of rows; default 16.")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="With --text: tokens per row; default 512, or the model's context.")
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
        raise InputError(f"--report {report} cannot be created as a folder: {error}.") from None
    path = exlm.find_model(model, progress=not quiet)
    source = None if against is None else exlm.find_model(against, progress=not quiet)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("Reading", total=None)
        quality = exlm.evaluate_model(
            path,
            source,
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
