"""What an `LLM` answers with: a finished `Completion`, or a `Stream` that becomes one. Data, no decisions."""

from __future__ import annotations

import threading
from collections.abc import Generator as Pieces
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..generator import StreamingResult

FinishReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter"]


@dataclass(frozen=True)
class Completion:
    """What a model said, and what it took; `str()` of it is the text.

    `token_ids` are the tokens behind the text: a stop token is not among them, those of a stop string are.
    `new_tokens` counts the stop token too. `cached_tokens` of the `prompt_tokens` were already in the cache.
    Times are in seconds.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    time_prefill: float
    time_generate: float
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """An answer on its way: iterate for its pieces of text; `completion` is the whole of it at the end.

    To leave early, stop iterating and let go of it, or call `close()`, which another thread may do: the
    request is dropped.
    """

    def __init__(self, pieces: Pieces[str, None, Completion]) -> None:
        """`pieces` returns the completion when it is exhausted."""
        self.completion: Completion | None = None
        self._pieces = pieces
        self._lock = threading.RLock()
        self._advancing = False  # the thread that holds the lock waits for a piece
        self._closed = False

    def __next__(self) -> str:
        with self._lock:
            piece = None if self._closed else self._next()
        if piece is None or self._closed:  # looked at without the lock, so that a close() meanwhile is seen
            self.close()
            raise StopIteration
        return piece

    def close(self) -> None:
        """Drop the request if it is still running; while a thread waits for a piece, once it has come."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._advancing:
                    self._pieces.close()
            finally:
                self._lock.release()

    def _next(self) -> str | None:
        try:
            self._advancing = True
            return next(self._pieces)
        except StopIteration as end:
            self.completion = end.value or self.completion
            return None
        finally:
            self._advancing = False


def token_ids_of_result(result: StreamingResult) -> list[int]:
    """The tokens behind the text of one result; often none."""
    found: list[int] = result["token_ids"][0].tolist() if "token_ids" in result else []
    return found


def completion_from_result(last: StreamingResult, tokens: Iterable[int]) -> Completion:
    """A job's last result, in short."""
    reason = last["eos_reason"]
    assert reason != "error"  # raised where it was read
    return Completion(
        text=last["full_completion"],
        token_ids=tuple(tokens),
        finish_reason=reason,
        prompt_tokens=last["prompt_tokens"],
        cached_tokens=last["cached_tokens"],
        new_tokens=last["new_tokens"],
        time_prefill=last["time_prefill"],
        time_generate=last["time_generate"],
        accepted_draft_tokens=last.get("accepted_draft_tokens", 0),
        rejected_draft_tokens=last.get("rejected_draft_tokens", 0),
    )
