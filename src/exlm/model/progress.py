"""Telling somebody how far loading is: a callback, a generator's yields, or a bar on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[int, int], object]


def no_progress(done: int, total: int) -> None:
    """Tells nobody."""


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on standard error that lives as long as the block, fed with (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
