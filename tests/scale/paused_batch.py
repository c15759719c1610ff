"""The program `exlm`, pausing after every write to a batch's journal until a line of standard input comes.

Once standard input has ended it does not pause any more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from exlm.batch import Journal
from exlm.cli import main

add = Journal.add


def add_and_pause(self: Journal, answers: Iterable[tuple[int, bytes]]) -> None:
    """Write to the journal, then wait."""
    add(self, answers)
    sys.stdin.readline()


if __name__ == "__main__":
    Journal.add = add_and_pause  # type: ignore[method-assign]
    main()
