"""Progress bars of downloads on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import MissingExtra

ProgressCallback = Callable[[int, int], object]
"""(bytes done, bytes in all)"""

StartStep = Callable[[str], ProgressCallback]
"""Starts a step with this title; returns the callback for its progress."""


def no_progress(title: str) -> ProgressCallback:
    """A step without a progress bar."""
    return lambda done, total: None


@contextmanager
def progress_bars(visible: bool) -> Iterator[StartStep]:
    """Show progress bars during the block, if `visible`; yields the function that starts a step."""
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
                if task.total is None:  # a step without a size was a wait: remove its line
                    progress.remove_task(task.id)

        def start(title: str) -> ProgressCallback:
            drop_unmeasured()
            task = progress.add_task(title, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        try:
            yield start
        finally:
            drop_unmeasured()
