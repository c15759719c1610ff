"""Runs the command line on a terminal with slow answers: TTY ARGUMENTS… It must be a session leader."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from exlm import Generator
from exlm.cli.__main__ import main
from exlm.cli.model_session import ModelSession

STEP = "[step]"
SECONDS_PER_STEP = 0.02


def slow_down() -> None:
    """Make answers long and each step slow, and print a mark on the terminal for every step."""
    original = Generator.iterate

    def iterate(self: Generator) -> Any:
        print(STEP, file=sys.stderr, flush=True)
        time.sleep(SECONDS_PER_STEP)
        return original(self)

    Generator.iterate = iterate  # type: ignore[method-assign]
    ModelSession.stop_conditions = property(lambda self: [])  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    handle = os.open(sys.argv.pop(1), os.O_RDWR)  # the first terminal a session leader opens becomes its own
    for standard in range(3):
        os.dup2(handle, standard)
    slow_down()
    main()
