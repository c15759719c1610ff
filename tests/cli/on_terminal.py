"""The command line on a terminal: TTY, then its arguments. The process must lead a session without one."""

from __future__ import annotations

import os
import sys

from exlm.cli.__main__ import main

if __name__ == "__main__":
    handle = os.open(sys.argv.pop(1), os.O_RDWR)  # the first terminal a session leader opens becomes its own
    for standard in range(3):
        os.dup2(handle, standard)
    main()
