"""`exlm info` describes a model or this machine; `exlm plan` estimates memory. Neither loads weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import exlm
from exlm import InputError, bench

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a .gguf file or owner/name on the Hub; the default model if left out."),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer, not only what differs.")] = False,
    spec: Annotated[bool, typer.Option("--spec", help="Print the whole model description.")] = False,
    device: Annotated[str | None, typer.Option(help="Where it would run: cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute precision: float32, float16 or bfloat16.")] = None,
    system: Annotated[
        bool, typer.Option("--system", help="Describe this machine instead: versions, devices, kernels.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --system: as JSON.")] = False,
) -> None:
    """Show a model's family, sizes, layers and formats, and the kernels it would run on.

    Example: exlm info ./llama-exl2 --layers
    """
    if system or as_json:
        if model is not None or not system:
            raise InputError("--system is about this machine and takes no model; --json goes with it.")
        _print_system(as_json)
        return
    config = exlm.Config(exlm.find_model(model, progress=True))
    config.device, config.dtype = device or config.device, dtype
    summary = exlm.Model(config).summary()
    console = Console()
    console.print(_facts_table(config, summary))
    console.print(_matrix_table(summary.matrices, every=layers))
    if spec:
        _print_spec(console, summary.spec)


def _print_system(as_json: bool) -> None:
    system = bench.describe_system()
    if as_json:
        typer.echo(json.dumps(system, indent=1))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in system.items():
        table.add_row(name, Text(value))
    Console().print(table)


def _facts_table(config: exlm.Config, s: exlm.Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    windows = sorted({attn.window for attn in s.spec.attentions if attn.window is not None})
    table.add_row("family", s.spec.architecture)
    table.add_row("parameters", f"{s.parameters / 1e6:,.1f} million")
    names = ", ".join(s.files[:3]) + (", …" if len(s.files) > 3 else "")
    table.add_row("files", f"{format_bytes(s.file_bytes)} in {len(s.files)} ({names})")
    table.add_row("layers", f"{len(s.spec.layers)} of width {s.spec.hidden}")
    if [*s.mixers] != ["attention"]:
        table.add_row("mixers", ", ".join(f"{count} × {name}" for name, count in s.mixers.items()))
    if s.spec.is_recurrent:
        table.add_row("state", f"{format_bytes(s.state_bytes)} for each sequence, however long")
    if attn := next(iter(s.spec.attentions), None):
        table.add_row("heads", f"{attn.heads} for queries, {attn.kv_heads} for keys and values, {attn.head_dim} wide")
    if windows:
        count = sum(attn.window is not None for attn in s.spec.attentions)
        table.add_row("windows", f"{', '.join(map(str, windows))} tokens in {count} layers")
    table.add_row("vocabulary", f"{s.spec.vocab:,}")
    table.add_row("context", f"{config.max_seq_len:,} tokens, {format_bytes(s.cache_bytes)} of cache each at 16 bits")
    table.add_row("would run on", f"{s.device} in {s.dtype}")
    return table


def _matrix_table(matrices: Iterable[exlm.MatrixSummary], every: bool) -> Table:
    """One line for each matrix; unless `every` is set, equal layers share a line."""
    table = Table("layers", "matrix", "shape", "stored as", "bits", "bytes", "kernel")
    groups: dict[tuple[object, ...], list[tuple[str, exlm.MatrixSummary]]] = {}
    for m in matrices:
        found = _LAYER.fullmatch(m.role)
        layer, name = (found[1], found[2]) if found else ("", m.role)
        key = (m.role,) if every else (name, m.in_features, m.out_features, m.form, m.nbytes, m.backend)
        groups.setdefault(key, []).append((layer, m))
    for members in groups.values():
        layer, m = members[0]
        numbers = _ranges([int(number) for number, _ in members if number])
        name = m.role.removeprefix(f"layers.{layer}.")
        shape = f"{m.in_features} → {m.out_features}"
        bits = f"{m.bits:.2f}" if m.nbytes else ""
        total = sum(each.nbytes for _, each in members)
        table.add_row(numbers, name, shape, m.form, bits, format_bytes(total) if total else "", m.backend)
    return table


def _ranges(numbers: list[int]) -> str:
    """Layer numbers with runs joined, as in `0–3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _print_spec(console: Console, value: object, indent: str = "") -> None:
    """Print the description as an indented list; runs of equal layers are printed once."""
    assert is_dataclass(value)
    for field in fields(value):
        item = getattr(value, field.name)
        if field.name == "layers":
            _print_layers(console, item, indent)
        elif field.name != "names" and is_dataclass(item):
            console.print(f"{indent}{field.name}: {type(item).__name__}")
            _print_spec(console, item, indent + "  ")
        elif field.name != "names":
            console.print(f"{indent}{field.name}: {item}")


def _print_layers(console: Console, layers: tuple[object, ...], indent: str) -> None:
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or layers[i] != layers[start]:
            console.print(f"{indent}layers {start} to {i - 1}:" if i - start > 1 else f"{indent}layer {start}:")
            _print_spec(console, layers[start], indent + "  ")
            start = i


def format_bytes(count: float) -> str:
    """A size in bytes with a unit, such as 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a .gguf file or owner/name on the Hub; the default model if left out."),
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
    dtype: Annotated[str | None, typer.Option(help="Compute precision: float32, float16 or bfloat16.")] = None,
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
        sizes = (one.weights, one.cache, one.workspace, one.total, one.usable)
        style = "red" if one.total > one.usable else None
        table.add_row(one.name, str(one.modules), *map(format_bytes, sizes), style=style)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{users} × {config.max_seq_len:,} tokens: {'fits' if found.fits else 'does not fit'}.")
    console.print(f"The longest context that fits: {found.largest:,} tokens for each of {users}.")
    if found.state_bytes:
        console.print(
            f"Recurrent states are {format_bytes(found.state_bytes)} of the cache: "
            f"{format_bytes(found.state_bytes / users)} for each of {users}, whatever the context."
        )
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
