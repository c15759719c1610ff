"""Telling somebody how far a download is: one line on standard error for each step, or silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import MissingExtra

ProgressCallback = Callable[[int, int], object]
"""Takes the bytes done and the bytes there are."""

StartStep = Callable[[str], ProgressCallback]
"""Announces the next piece of work, and returns where to report on it."""


def no_progress(title: str) -> ProgressCallback:
    """A step that nobody watches."""
    return lambda done, total: None


@contextmanager
def progress_bars(visible: bool) -> Iterator[StartStep]:
    """Progress bars that live as long as the block, or none."""
    if not visible:
        yield no_progress
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError as error:
        raise MissingExtra("A progress bar needs rich: pip install rich, or ask for no progress.") from error

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:

        def drop_unmeasured() -> None:
            for task in progress.tasks:
                if task.total is None:  # a wait that is over leaves no line behind
                    progress.remove_task(task.id)

        def start(title: str) -> ProgressCallback:
            drop_unmeasured()
            task = progress.add_task(title, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        try:
            yield start
        finally:
            drop_unmeasured()
