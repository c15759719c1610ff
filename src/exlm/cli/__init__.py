"""The command line, `exlm COMMAND`: one module for each command, and what several of them share.

It takes arguments and prints text, tables and progress; it is the only package that prints. Nothing imports
it but `exlm.__main__` and the console script.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WITHOUT_TORCH = ("cache",)
"""Commands that need no torch."""


def main() -> None:
    """Run a command; the GPU context it needs is created while torch is being imported."""
    try:
        with _exit_at_once_on_sigint():
            from .startup import ensure_stdio, warm_up

            ensure_stdio()
            warm_up(sys.argv[1:])
            from .__main__ import main as run

            if _needs_torch(sys.argv[1:]):
                import torch  # noqa: F401 - here, where Ctrl-C ends the process at once

        run()
    except KeyboardInterrupt:  # raised between the two handlers, or by the program that called us
        sys.exit(130)


def _needs_torch(arguments: Sequence[str]) -> bool:
    """Whether a command line runs a command that uses torch; help texts and the version do not."""
    return bool(arguments) and arguments[0] not in WITHOUT_TORCH and not {"--help", "--version"} & set(arguments)


def restore_sigint() -> None:
    """Give SIGINT Python's own handler if this process was started with the signal ignored.

    A shell without job control, such as one that runs a script, starts `exlm … &` that way, and Python then
    installs no handler: Ctrl-C and `kill -INT` would be lost wherever a command relies on KeyboardInterrupt.
    SIGHUP, which nohup has ignored, stays as it is. So does a handler of a program that calls `main`.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _exit_at_once_on_sigint() -> Iterator[None]:
    """Exit at once on Ctrl-C: nothing has been started yet that would have to be cleaned up.

    Imports take a second or two. A KeyboardInterrupt raised in the middle of them would not do: torch and
    numpy swallow some exceptions while they are imported, and turn others into errors of their own.
    """
    restore_sigint()
    in_main_thread = threading.current_thread() is threading.main_thread()
    default_handler = (
        in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # not a program's own
    if default_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        if default_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
