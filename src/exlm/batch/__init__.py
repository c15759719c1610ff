"""Batches: a file of requests in, a file of answers out, and no row lost or done twice if the power goes."""

from .files import BadRow, Row, Rows, answers, read_rows, write_answers
from .journal import Journal, JournalError
from .run import Progress, run_rows
from .wording import Wording

__all__ = [
    "BadRow",
    "Journal",
    "JournalError",
    "Progress",
    "Row",
    "Rows",
    "Wording",
    "answers",
    "read_rows",
    "run_rows",
    "write_answers",
]
