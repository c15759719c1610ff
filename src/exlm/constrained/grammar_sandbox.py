"""Compiles each untrusted grammar in a subprocess first, because compiling one can crash or never end.

The subprocess (`grammar_sandbox_worker`) has limits of time, memory and stack. A grammar that compiles within
them is remembered by its digest and may be compiled in this process.
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

WORKER = Path(__file__).with_name("grammar_sandbox_worker.py")
INSTALL_HINT = "Grammar, JSON schema and regex filters need llguidance: pip install 'exlm[grammar]'"
PARSER_LIMITS = {"max_lexer_states": 100_000, "verbose_errors": False}
"""Limits of every matcher; llguidance's defaults for the rest bound a step to some tens of milliseconds."""

COMPILE_SECONDS = 0.3  # a grammar is compiled twice more, for the filter and for its job: one second in all
START_SECONDS = 30.0  # for starting the subprocess on a loaded machine
MAX_GRAMMAR_SIZE = 1 << 20
MAX_ACCEPTED = 4096
MAX_REASON_LENGTH = 600
WORKER_LIMITS = {"limits": PARSER_LIMITS, "seconds": COMPILE_SECONDS, "max_reason_length": MAX_REASON_LENGTH}


class GrammarRequest(NamedTuple):
    """A grammar, and the tokens it may name: the size of the vocabulary and its special tokens."""

    grammar: str
    size: int
    special: Mapping[int, str]


class GrammarSandbox:
    """Checks grammars and remembers those that passed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def check(self, request: GrammarRequest, kind: str) -> None:
        """Raise InputError for a grammar that is too large, invalid or too slow; errors call it `kind`."""
        if (size := len(request.grammar.encode())) > MAX_GRAMMAR_SIZE:
            raise InputError(
                f"The {kind} is too large: {size:,} bytes, at most {MAX_GRAMMAR_SIZE:,} are taken."
            )
        message = json.dumps({**request._asdict(), "path": _package_folder(), **WORKER_LIMITS}).encode(
            "ascii"
        )
        digest = hashlib.blake2b(message, digest_size=16).digest()
        with self._lock:
            if digest in self._accepted:
                self._accepted.move_to_end(digest)
                return
        _compile_in_worker(message, kind)
        with self._lock:
            self._accepted[digest] = None
            while len(self._accepted) > MAX_ACCEPTED:
                self._accepted.popitem(last=False)


def _compile_in_worker(request: bytes, kind: str) -> None:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", str(WORKER)],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS + COMPILE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"The process that compiles a {kind} did not start: {error}") from None
    started, _, reply = ran.stdout.decode("utf-8", "replace").partition(" ")
    if not started:
        raise InputError(f"The process that compiles a {kind} did not start: exit status {ran.returncode}.")
    if reply.startswith("bad "):
        raise InputError(f"The {kind} is invalid: {one_line(reply.removeprefix('bad '))}")
    if reply != "good":
        reason = (
            f"takes longer than {COMPILE_SECONDS} s"
            if ran.returncode == 1
            else "needs too much memory or nests too deep"
        )
        raise InputError(f"The {kind} is too complex: compiling it {reason}. Make it smaller or less nested.")


def one_line(message: str) -> str:
    """A message of llguidance on one line, truncated to MAX_REASON_LENGTH."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "it matches no text at all."
    return text if len(text) <= MAX_REASON_LENGTH else text[:MAX_REASON_LENGTH] + " …"


def _package_folder() -> str:
    found = importlib.util.find_spec("llguidance")
    if found is None or found.origin is None:
        raise MissingExtra(INSTALL_HINT)
    return str(Path(found.origin).parent.parent)
