"""Batches: a file of requests in, a file of answers out; no row is lost or done twice if the process dies.

`run_rows` takes the rows of a file, a `Journal` and a generator; answers, the lines of the output, go to the journal as
they are made, and `write_answers` writes the output from it. `scale` and `cli` may import this package; it imports
`exlm` and `serve`.
"""

from .journal import Journal, JournalError
from .rows import BadRow, Row, RowHandler, Rows, is_answered, read_rows, write_answers
from .run import Progress, run_rows

__all__ = [
    "BadRow",
    "Journal",
    "JournalError",
    "Progress",
    "Row",
    "RowHandler",
    "Rows",
    "is_answered",
    "read_rows",
    "run_rows",
    "write_answers",
]

NAMES_OF_0_1 = {"Wording": "RowHandler", "answers": "is_answered"}
"""Public names of version 0.1 that still work, and what they are called now."""

globals().update({old: globals()[new] for old, new in NAMES_OF_0_1.items()})
