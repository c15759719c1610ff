"""The command line: the only part of exlm that prints."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main() -> None:
    """Run a command; what it needs of a GPU is begun before anything large is imported."""
    try:
        with _exit_at_once_on_sigint():
            from .cuda_warmup import warm_up
            from .stdio import ensure_stdio

            ensure_stdio()
            warm_up(sys.argv[1:])
            from .__main__ import main as run

            if _needs_torch(sys.argv[1:]):
                import torch  # noqa: F401 - here, where Ctrl-C ends the process at once

        run()
    except KeyboardInterrupt:  # between the two, or from somebody else
        sys.exit(130)


def _needs_torch(arguments: Sequence[str]) -> bool:
    """Whether a command line does more than show a help text or the version, which need no torch."""
    return bool(arguments) and not {"--help", "--version"} & set(arguments)


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
    """Ctrl-C ends the process at once, as nothing is begun yet.

    Importing takes a second or two, in which people change their minds. An exception would not do: in the
    midst of their imports torch and numpy pass over some, and make other errors of others.
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
