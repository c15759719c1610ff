"""The progress bar that old scripts borrow for work of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def get_basic_progress() -> Progress:
    """A bar of rich's: `with get_basic_progress() as bar: task = bar.add_task("Jobs", total=9)`."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    words = TextColumn("{task.description}")
    return Progress(words, BarColumn(None), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
