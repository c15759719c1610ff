"""`exlm quantize`: quantise a float model and report how close the result is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import exlm
from exlm import InputError

from .evaluate import print_quality

Rows = Annotated[
    int | None,
    typer.Option(min=1, help="Rows of calibration text; default 128, fewer for a large model on a CPU."),
]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens per row; default 512, or the model's context.")
]
HeadBits = Annotated[
    int | None, typer.Option(help="Bits per weight of the head: 2, 3, 4, 5, 6 or 8; default 6.")
]
GroupSize = Annotated[int | None, typer.Option(help="Rows of a GPTQ group: 32, 64 or 128; default 128.")]


def quantize(
    source: Annotated[str, typer.Argument(help="A model folder, a .gguf file, or a name on the Hub.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    bits: Annotated[
        float | None, typer.Option(help="Bits per weight of the layers, scales included; default 4.0.")
    ] = None,
    head_bits: HeadBits = None,
    size: Annotated[
        str | None, typer.Option(help="Instead of --bits: size of the weights, as in 5.2GB.")
    ] = None,
    max_kld: Annotated[
        float | None, typer.Option(help="Instead of --bits: largest KL divergence from the source, in nats.")
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="builtin, or a .txt, .jsonl or .parquet file.")
    ] = "builtin",
    method: Annotated[str, typer.Option(help="exl2, or gptq (4 bit, act-order).")] = "exl2",
    group_size: GroupSize = None,
    rows: Rows = None,
    length: Length = None,
    measurement: Annotated[
        Path | None,
        typer.Option(help="A measurement to reuse: one of exlm, or exllamav2's measurement.json."),
    ] = None,
    save_measurement: Annotated[
        Path | None, typer.Option(help="Save the measurement here, for other targets.")
    ] = None,
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
    with _progress_bar(quiet) as shown:
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
            progress=shown,
        )
    if quality is not None:
        _report_quality(quality, max_kld, quiet)


def _report_quality(quality: exlm.Quality, max_kld: float | None, quiet: bool) -> None:
    if not quiet:
        print_quality(quality)
    if quality.kl is not None and max_kld is not None and quality.kl > max_kld:
        words = f"It diverges by {quality.kl:.3g} from its source; at most {max_kld:g} was asked for."
        typer.echo(words, err=True)
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
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=f"{what:<24}"
        )
