"""Reads the user's messages from standard input, with line editing and a history on a terminal.

`readline` is used where the standard library has it, and pasted lines then stay one message. Without a
terminal or without `readline` input is read line by line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exlm import InputError

FENCE = '"""'
HISTORY_SIZE = 1000
"""Messages of earlier conversations that the up key recalls."""
WAKEUP_SECONDS = 0.2


class MessageReader:
    """Reads messages from standard input."""

    def __init__(self, history: Path | None = None) -> None:
        """`history` is the file that keeps earlier messages; it is used on a terminal only."""
        self.interactive = sys.stdin.isatty()
        self._history = history if self.interactive else None
        self._editor = _load_readline(self._history) if self.interactive else None

    def read(self) -> str | None:
        """The next message that is not blank; None at the end of input. Raises KeyboardInterrupt.

        A message may span lines: each but the last ends in a backslash, or three quotes enclose all of them.
        """
        try:
            while not (text := self._read_message().strip()):
                continue
        except EOFError:
            return None
        if self._editor is not None:
            self._editor.add_history(text)
        if self._history is not None:
            _append_history(self._history, text)
        return text

    def _read_message(self) -> str:
        line = self._read_line("> ")
        if line.lstrip().startswith(FENCE):
            return self._read_fenced(line.lstrip().removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read_continuation())
        return "\n".join(lines)

    def _read_fenced(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(FENCE):
            try:
                lines.append(self._read_line(". "))
            except EOFError:
                return "\n".join(lines)
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines)

    def _read_continuation(self) -> str:
        try:
            return self._read_line(". ")
        except EOFError:
            return ""

    def _read_line(self, prompt: str) -> str:
        if not self.interactive:
            return input()
        if sys.stdout.isatty():
            return input(prompt)
        sys.stderr.write(prompt)  # keep the prompt out of redirected output
        sys.stderr.flush()
        return input()


def check_utf8(text: str) -> str:
    """Return the text, or raise InputError if it has surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[: error.start][-20:]
        raise InputError(
            f"This is not UTF-8 text: what comes after {before!r} is no character. Convert it first, as with "
            "`iconv -f latin1 -t utf-8`."
        ) from None
    return text


class SigintHandler:
    """Handles Ctrl-C: KeyboardInterrupt while the user types, else a request to stop that is polled."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._typing = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT within the block; it then does not end the program."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may install signal handlers
            return
        with _signal_action(signal.SIGINT, self._on_signal):
            yield

    @contextmanager
    def typing(self) -> Iterator[None]:
        """Mark a block in which the user types; a request that came just before counts as made in it."""
        with _periodic_wakeups():
            self._typing = True
            try:
                if self.take_request():
                    raise KeyboardInterrupt
                yield
            finally:
                self._typing = False

    def take_request(self) -> bool:
        """Whether a stop was requested; resets the request."""
        requested, self.stop_requested = self.stop_requested, False
        return requested

    def _on_signal(self, *_: object) -> None:
        if not self._typing:
            self.stop_requested = True
            return
        self._typing = False
        raise KeyboardInterrupt


@contextmanager
def _signal_action(number: int, action: Callable[..., object]) -> Iterator[None]:
    """Install a signal handler for the duration of the block."""
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _periodic_wakeups() -> Iterator[None]:
    """Interrupt the wait for a key a few times a second.

    Readline notices a signal only if it arrives while readline waits. Without wake-ups a Ctrl-C that came a
    moment earlier would be noticed after the next line, which would then be lost.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _signal_action(signal.SIGALRM, lambda *_: None):
        signal.setitimer(signal.ITIMER_REAL, WAKEUP_SECONDS, WAKEUP_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _load_readline(history: Path | None) -> Any:
    """The readline module with the history loaded; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)
    for text in _read_history(history) if history is not None else ():
        readline.add_history(text)
    return readline


def _read_history(path: Path) -> list[str]:
    """The last messages of a history file; lines that are not JSON strings are skipped."""
    texts: list[str] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-HISTORY_SIZE:]:
            with contextlib.suppress(ValueError):
                texts += [text] if isinstance(text := json.loads(line), str) else []
    return texts


def _append_history(path: Path, text: str) -> None:
    """Append to a history that only its owner can read; a file that cannot be written is ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(text) + "\n")
