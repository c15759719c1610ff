"""Batches: a file of requests in, a file of answers out, and no row lost or done twice if the power goes."""

from .files import Rows, answers, read_rows, write_answers
from .journal import Journal, JournalError
from .run import Progress, run_rows

__all__ = [
    "Journal",
    "JournalError",
    "Progress",
    "Rows",
    "answers",
    "read_rows",
    "run_rows",
    "write_answers",
]
