"""The subprocess that compiles one untrusted grammar and exits. It is started by path and imports no exlm.

llguidance's compiler recurses and may run for long, so a hostile grammar can exhaust stack, memory or time.
It then ends this process and not the server: memory and stack are limited, and faulthandler's watchdog thread
ends the process after the time limit. The request is JSON on standard input. The reply on standard output is
`started`, then `good`, or `bad` and the reason.
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

STACK_BYTES = 1 << 20  # a fraction of the stack that the compiler has in the calling process
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Read the request, compile in a thread with a small stack, and reply."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    library = _load_llguidance(request["path"])
    _limit_resources()
    os.write(1, b"started ")
    threading.stack_size(STACK_BYTES)
    with open(os.devnull, "w") as null:
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=null)
        thread = threading.Thread(target=_compile, args=(library, request), daemon=True)
        thread.start()
        thread.join()


def _load_llguidance(folder: str) -> Any:
    """The extension module alone: importing the whole package takes longer than compiling a grammar."""
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
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _compile(library: Any, request: dict[str, Any]) -> None:
    """Compile, and compute the first mask: both can take long."""
    tokenizer = library.LLTokenizer(ByteLevelVocabulary(request["size"], request["special"]), slices=[])
    limits = library.LLParserLimits(**request["limits"])
    matcher = library.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        os.write(1, b"bad " + matcher.get_error().encode()[: request["max_reason_length"]])
    else:
        os.write(1, b"good")


class ByteLevelVocabulary:
    """A vocabulary of the model's special tokens under their ids, and beyond them every byte and an EOS."""

    is_tokenizer_wrapper = True

    def __init__(self, size: int, special: dict[str, str]) -> None:
        """Set the attributes that llguidance reads."""
        self._first_byte_id = size
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(256)] + [b"<eos>"]
        for token_id, text in special.items():
            self.tokens[int(token_id)] = text.encode()
        self.eos_token_id = size + 256
        self.bos_token_id = None
        self.special_token_ids = [*map(int, special), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of the first 256 bytes of a text."""
        raw = text.encode() if isinstance(text, str) else text
        return [self._first_byte_id + byte for byte in raw[:256]]


if __name__ == "__main__":
    main()
