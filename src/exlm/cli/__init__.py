"""The command line: the only part of exlm that prints."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; what it needs of a GPU is begun before anything large is imported."""
    try:
        from .early import begin
        from .streams import open_streams

        open_streams()
        begin(sys.argv[1:])
        from .__main__ import main as run

        run()
    except KeyboardInterrupt:  # importing takes a second or two, in which people change their minds
        sys.exit(130)
