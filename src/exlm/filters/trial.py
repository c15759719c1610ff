"""Whether a grammar can be compiled at all, found out where it can do no harm.

A grammar is first compiled in a process of its own (`trial_worker`), within limits that hold whatever it
does; only what passes is compiled in this one. What passed is remembered. What a grammar means is not known
here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError, MissingExtra

WORKER = Path(__file__).with_name("trial_worker.py")
INSTALL = "Grammar, JSON schema and regex filters need llguidance: pip install 'exlm[grammar]'"
LIMITS = {"max_lexer_states": 100_000, "verbose_errors": False}
"""For every parser; the rest as llguidance sets it, which bounds a step to some tens of milliseconds."""

SECONDS = 0.3  # what passes is compiled twice more, for the filter and for its job: a second in all
START_SECONDS = 30.0  # a loaded machine may take its time to start a process
LARGEST = 1 << 20
REMEMBERED = 4096
LONGEST_REASON = 600
BOUNDS = {"limits": LIMITS, "seconds": SECONDS, "longest": LONGEST_REASON}


class Trial(NamedTuple):
    """A grammar, and the tokens it may name: how many there are, and the special ones."""

    grammar: str
    size: int
    special: Mapping[int, str]


class Trials:
    """The grammars that passed."""

    def __init__(self) -> None:
        """None so far."""
        self._lock = threading.Lock()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def check(self, trial: Trial, what: str) -> None:
        """Refuse a grammar that is too large, invalid or too costly; `what` is its name in errors."""
        if (size := len(trial.grammar.encode())) > LARGEST:
            raise InputError(f"The {what} is too large: {size:,} bytes, at most {LARGEST:,} are taken.")
        request = json.dumps({**trial._asdict(), "path": _package_folder(), **BOUNDS}).encode("ascii")
        digest = hashlib.blake2b(request, digest_size=16).digest()
        with self._lock:
            if digest in self._passed:
                self._passed.move_to_end(digest)
                return
        _try(request, what)
        with self._lock:
            self._passed[digest] = None
            while len(self._passed) > REMEMBERED:
                self._passed.popitem(last=False)


def _try(request: bytes, what: str) -> None:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", str(WORKER)],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS + SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"The process that tries a {what} did not start: {error}") from None
    started, _, verdict = ran.stdout.decode("utf-8", "replace").partition(" ")
    if not started:
        raise InputError(f"The process that tries a {what} did not start: exit status {ran.returncode}.")
    if verdict.startswith("bad "):
        raise InputError(f"The {what} is invalid: {one_line(verdict.removeprefix('bad '))}")
    if verdict != "good":
        how = (
            f"takes longer than {SECONDS} s"
            if ran.returncode == 1
            else "needs too much memory or nests too deep"
        )
        raise InputError(f"The {what} is too complex: compiling it {how}. Make it smaller or less nested.")


def one_line(message: str) -> str:
    """A message of llguidance, without its line breaks and at a bearable length."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "it matches no text at all."
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " …"


def _package_folder() -> str:
    found = importlib.util.find_spec("llguidance")
    if found is None or found.origin is None:
        raise MissingExtra(INSTALL)
    return str(Path(found.origin).parent.parent)
