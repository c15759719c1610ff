"""What `exlm bench --mix` prints: a table for each mix, and how the other engine was built."""

from __future__ import annotations

from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from exlm import bench as benchmark

from .info import format_bytes

_COLUMNS = (
    *("engine", "prompt, tok/s", "of int8", "decode, tok/s", "of read", "8 rows", "first token, s"),
    "peak, MB",
)


def mix_table(results: list[benchmark.MixResult]) -> Table:
    """One mix, with a section for each number of threads."""
    one = results[0]
    types = ", ".join(f"{count} {name}" for name, count in one.types.items())
    title = f"{one.mix}: {one.bits:.2f} bits per weight ({types})"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("threads", justify="right")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    for result in results:
        for number, engine in enumerate(result.peers):
            last = number == len(result.peers) - 1
            threads = str(result.threads) if number == 0 else ""
            table.add_row(threads, *_cells(result, engine), end_section=last and len(result.peers) == 1)
        if len(result.peers) > 1:
            table.add_row("", *_ratio_cells(*result.peers[:2]), end_section=True)
    limits = [f"{result.bandwidth / 1e9:.1f} GB/s read, {_peak_text(result)}" for result in results]
    several = [f"threads {result.threads}: {text}" for result, text in zip(results, limits, strict=True)]
    table.caption = f"{format_bytes(one.bytes_per_token)} read for a token; limits: " + "; ".join(
        several if len(results) > 1 else limits
    )
    table.caption_justify = "left"
    return table


def _peak_text(result: benchmark.MixResult) -> str:
    return "int8 peak not measured" if result.int8_peak is None else f"{result.int8_peak / 1e12:.2f} int8 TOPS"


def _cells(result: benchmark.MixResult, engine: benchmark.EngineResult) -> list[str]:
    shares = result.prompt_share(engine), result.decode_share(engine)
    prompt, decode = ("" if share is None else f"{share:.0%}" for share in shares)
    rates = (_number(engine.median("prompt")), prompt or "–", _number(engine.median("decode")), decode)
    return [
        engine.engine,
        *rates,
        _number(engine.median("batch")),
        first_token_text(engine),
        f"{engine.median('peak') or 0:,.0f}",
    ]


def first_token_text(engine: benchmark.EngineResult) -> str:
    """Seconds to the first token at the first start with this file, then the median of later starts."""
    first, *later = engine.values["first"]
    return f"{first:.1f}, then {median(later):.1f}" if later else f"{first:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.{int(value < 100)}f}"


def _ratio_cells(own: benchmark.EngineResult, other: benchmark.EngineResult) -> list[str]:
    """By which factor the first engine's speeds are those of the second."""
    cells = [f"{own.engine} / {other.engine}"]
    for metric in ("prompt", "decode", "batch"):
        ours, theirs = own.median(metric), other.median(metric)
        cells += ["" if ours is None or not theirs else f"{ours / theirs:.2f} ×", ""]
    return [*cells, ""]


def print_builds(console: Console, peers: list[benchmark.EngineResult], interpreters: dict[str, str]) -> None:
    """Print how llama.cpp was built, and how to build it for this processor if it was not."""
    for engine in peers:
        line = engine.build.get("instruction_sets")
        if line is None:
            continue
        where = f" ({interpreters[engine.engine]})" if engine.engine in interpreters else ""
        console.print(
            f"{engine.engine}: {engine.build['package']}{where}, built for: {line}", soft_wrap=True, markup=False
        )
        missing = benchmark.missing_sets(line)
        if missing:
            console.print(
                f"This build lacks {', '.join(missing)}, which this processor has; users' own builds, Ollama and the "
                "official packages have them and are faster. Build it for this processor, in an environment of its "
                "own, and name that with --peer llama.cpp=ENVIRONMENT/bin/python:",
                soft_wrap=True,
            )
            console.print(f"  {benchmark.build_command()}", soft_wrap=True, markup=False)
