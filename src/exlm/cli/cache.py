"""`exlm cache` lists the packed matrices that earlier starts on a CPU left in the cache folder, and removes them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exlm import InputError, env
from exlm.kernels.packed_store import PACKED_FOLDER, Entry, PackedStore

from .info import format_bytes


def cache(
    model: Annotated[
        str | None, typer.Argument(help="Only of this model: its path, or the last part of it; all if left out.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; the next start packs the model again.")] = False,
) -> None:
    """Show which models have packed matrices in the cache folder, with their sizes and last use, or remove them.

    Example: exlm cache tinyllama.Q4_K_M.gguf --clear
    """
    store = PackedStore(env.cache_folder() / PACKED_FOLDER, env.packed_cache_bytes())
    entries = [entry for entry in store.entries() if model is None or _is_of(entry, model)]
    if model is not None and not entries:
        raise InputError(f"{store.folder} has no packed matrices of {model}: `exlm cache` lists what is there.")
    if clear:
        for entry in entries:
            store.remove(entry)
        store.remove_partial_files()
        typer.echo(f"files removed: {len(entries)} ({format_bytes(sum(entry.size for entry in entries))})")
        return
    total = sum(entry.size for entry in entries)
    console = Console()
    if entries:
        console.print(_table(entries))
    limit = "none are kept" if not store.max_bytes else f"at most {format_bytes(store.max_bytes)}"
    console.print(f"{format_bytes(total)} in {store.folder} ({limit}: EXLM_PACKED_CACHE)", soft_wrap=True, markup=False)


def _is_of(entry: Entry, model: str) -> bool:
    return bool(entry.model) and (
        Path(entry.model).name == model or Path(entry.model).resolve() == Path(model).resolve()
    )


def _table(entries: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("last use")
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).astimezone()
        table.add_row(
            Text(entry.model or f"damaged: {entry.path.name}"), format_bytes(entry.size), f"{used:%Y-%m-%d %H:%M}"
        )
    return table
