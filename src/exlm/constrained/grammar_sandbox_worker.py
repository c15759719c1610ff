"""The process in which a grammar is compiled for the first time. It is started by its path, tries one grammar
and ends; it imports nothing from exlm.

A grammar may come from a stranger, and its compiler recurses and can run for long: what would be a crash of
the server is one of this process. It gets little memory and stack, and a watchdog that needs no cooperation
ends it when its time is up. The request is on standard input; the reply, on standard output, is `started`,
then `good`, or `bad` and why.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STACK_BYTES = 1 << 20  # a fraction of what the threads of a real program have
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Try the grammar."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    library = _load_llguidance(request["path"])
    _limit_resources()
    os.write(1, b"started ")
    threading.stack_size(STACK_BYTES)
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
        thread = threading.Thread(target=_compile, args=(library, request), daemon=True)
        thread.start()
        thread.join()


def _load_llguidance(folder: str) -> Any:
    """The compiled part of llguidance alone: what its package imports besides takes longer than a trial."""
    sys.path.insert(0, folder)
    package = ModuleType("llguidance")
    package.__path__ = [os.path.join(folder, "llguidance")]
    sys.modules["llguidance"] = package
    try:
        from llguidance import _lib
    except ImportError:
        del sys.modules["llguidance"]
        import llguidance as _lib  # type: ignore[no-redef]
    return _lib


def _limit_resources() -> None:
    try:
        import resource
    except ImportError:  # not on this system
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _compile(library: Any, request: dict[str, Any]) -> None:
    """Compile, and compute what may come first: both can take long."""
    tokenizer = library.LLTokenizer(ByteLevelVocabulary(request["size"], request["special"]), slices=[])
    limits = library.LLParserLimits(**request["limits"])
    matcher = library.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        os.write(1, b"bad " + matcher.get_error().encode()[: request["longest"]])
    else:
        os.write(1, b"good")


class ByteLevelVocabulary:
    """The model's special tokens where they are, and above them every byte and an end; no other tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, size: int, special: dict[str, str]) -> None:
        """What llguidance asks of a vocabulary."""
        self._first = size
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(256)] + [b"<the end>"]
        for number, text in special.items():
            self.tokens[int(number)] = text.encode()
        self.eos_token_id = size + 256
        self.bos_token_id = None
        self.special_token_ids = [*map(int, special), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of the start of a text."""
        raw = text.encode() if isinstance(text, str) else text
        return [self._first + byte for byte in raw[:256]]


if __name__ == "__main__":
    main()
