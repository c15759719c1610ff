"""Batches: a file of requests in, a file of answers out, and no row lost or done twice if the power goes."""

from .adapter import RowAdapter
from .files import BadRow, Row, Rows, is_answered, read_rows, write_answers
from .journal import Journal, JournalError
from .run import Progress, run_rows

__all__ = [
    "BadRow",
    "Journal",
    "JournalError",
    "Progress",
    "Row",
    "RowAdapter",
    "Rows",
    "is_answered",
    "read_rows",
    "run_rows",
    "write_answers",
]
