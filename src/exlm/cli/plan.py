"""`exlm plan`: estimate a model's memory on each device, and the longest context that fits."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import exlm
from exlm import InputError

from .info import format_bytes


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a .gguf file or owner/name on the Hub; the default model if left out."
        ),
    ] = None,
    ctx: Annotated[
        str | None, typer.Option(help="Context length of one user, as in 8192 or 32k; default: the model's.")
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="Number of users at once.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of the GPUs in GB, as in 24,24; default: this machine's.")
    ] = None,
    cache: Annotated[str, typer.Option(help="Type of the KV cache: fp16, q8, q6, q4 or fp8.")] = "fp16",
    device: Annotated[str | None, typer.Option(help="Where it would run: cpu, cuda, cuda:0,cuda:1.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Compute precision: float32, float16 or bfloat16.")
    ] = None,
) -> None:
    """Show the weights, cache and workspace a model needs on each device, and the longest context that fits.

    Example: exlm plan ./llama-exl2 --gpu 24,24 --ctx 32k --users 4
    """
    config = exlm.Config(exlm.find_model(model, progress=True))
    config.device, config.dtype = device or config.device, dtype
    trained_length = config.max_seq_len
    config.max_seq_len = _parse_tokens(ctx) if ctx is not None else trained_length
    if cache not in exlm.CACHES:
        raise InputError(f"--cache must be one of {', '.join(exlm.CACHES)}, found {cache!r}.")
    found = exlm.Model(config).plan(config.max_seq_len, users, exlm.CACHES[cache], _parse_memory(gpu))
    table = Table("device", "modules", "weights", "cache", "workspace", "sum", "usable")
    for one in found.devices:
        total = one.weights + one.cache + one.workspace
        sizes = (one.weights, one.cache, one.workspace, total, one.usable)
        style = "red" if total > one.usable else None
        table.add_row(one.name, str(one.modules), *map(format_bytes, sizes), style=style)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{users} × {config.max_seq_len:,} tokens: {'fits' if found.fits else 'does not fit'}.")
    console.print(f"The longest context that fits: {found.largest:,} tokens for each of {users}.")
    if max(config.max_seq_len, found.largest) > trained_length:
        more = ": to read more it also needs its positions stretched, as with config.scale_alpha_value"
        if config.spec.embed.learned_positions:
            more = " and has no positions for more"
        console.print(f"The model itself is made for {trained_length:,} tokens{more}.")
    if not found.fits:
        shorter = f"--ctx {found.largest}, " if found.largest else ""
        console.print(f"{found.problem} Here: {shorter}fewer --users, or --cache q4.")
        raise typer.Exit(1)


def _parse_tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kK]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise InputError(f"--ctx must be a number of tokens, as in 8192 or 32k; found {text!r}.")
    return int(match[1]) * (1024 if match[2] else 1)


def _parse_memory(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        memory = [float(part) for part in text.split(",")]
    except ValueError:
        memory = []
    if not memory or not all(0 < one < 1 << 20 for one in memory):
        raise InputError(f"--gpu must be GB for each GPU, as in 24,24; found {text!r}.")
    return memory
