"""Stand-ins to test generation with, shipped with the package: a tokenizer that needs no files, and a model
that follows a script over a cache that cannot lie. They import no torch and nothing of the generator:
whatever has the right attributes will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class ByteTokenizer:
    """Every byte of UTF-8 is a token, and its value is its id."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, with U+FFFD for what is not UTF-8."""
        return bytes(ids).decode(errors="replace")


class SequenceView(Protocol):
    """What the fake model must know of a sequence."""

    @property
    def ids(self) -> list[int]:
        """The prompt and what was sampled so far."""

    @property
    def salt(self) -> bytes:
        """Whatever else makes keys and values differ for equal ids."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading ids whose rows are valid."""

    @property
    def pages(self) -> list[int]:
        """The pages that hold the rows."""


Script = Callable[[Sequence[int]], Iterable[int]]
"""From the ids so far to the ids that may come next, best first."""


class ScriptedRunner:
    """A model that follows a script, over a cache in which each row knows what it was computed from.

    A row stands for the salt and all ids up to its own, exactly; so reading a row that does not belong to the
    sequence (a wrong page, a stale share, a bad copy, rows never written) fails at once. `computed` lists the
    length of each prefill, `copied` each copied row count, `steps` the rows of each decode.
    """

    def __init__(
        self,
        script: Script,
        num_pages: int,
        page_size: int = 256,
        vocab_size: int = 256,
        wrap_scores: Callable[[list[list[float]]], Any] = lambda scores: scores,
    ) -> None:
        self.script = script
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.wrap_scores = wrap_scores
        self.prefill_lengths: list[int] = []
        self.copied_row_counts: list[int] = []
        self.decode_batch_sizes: list[int] = []
        self._rows: list[list[int]] = [[-1] * page_size for _ in range(num_pages)]
        self._prefixes: list[tuple[int, int | bytes]] = []  # a row's number → the row before it, its own id
        self._prefix_numbers: dict[tuple[int, int | bytes], int] = {}

    def copy_pages(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Write the first rows of one page to another: (source, target, tokens)."""
        for source, target, tokens in copies:
            self._rows[target][:tokens] = self._rows[source][:tokens]
            self.copied_row_counts.append(tokens)

    def prefill(self, sequence: SequenceView, start: int, stop: int) -> None:
        """Compute the rows of a stretch of ids."""
        self.prefill_lengths.append(stop - start)
        self._write(sequence, start, sequence.ids[start:stop])

    def decode(
        self, sequences: Sequence[SequenceView], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Feed each sequence `tokens` after `past` ids; for each of them a list of scores, in one answer."""
        self.decode_batch_sizes.append(len(sequences))
        answers = []
        for sequence, start, fed in zip(sequences, past, tokens, strict=True):
            self._write(sequence, start, fed)
            ids = [*sequence.ids[:start], *fed]
            answers.append(self.wrap_scores([self._scores(ids[: start + n + 1]) for n in range(len(fed))]))
        return answers

    def invalidate_rows(self, sequence: SequenceView, start: int, stop: int) -> None:
        """Leave rows in the state of a computation that failed halfway."""
        for position in range(start, stop):
            page, row = divmod(position, self.page_size)
            self._rows[sequence.pages[page]][row] = -1

    def check_rows(self, sequence: SequenceView, upto: int) -> int:
        """Read the first rows of a sequence; returns what the last one stands for."""
        number = self._prefix_number(-1, sequence.salt)
        for position in range(upto):
            number = self._prefix_number(number, sequence.ids[position])
            page, row = divmod(position, self.page_size)
            found = self._rows[sequence.pages[page]][row]
            if found != number:
                raise AssertionError(
                    f"Row {position} (page {sequence.pages[page]}) was computed from {self._prefix(found)}, "
                    f"but the sequence is {self._prefix(number)}."
                )
        return number

    def _write(self, sequence: SequenceView, start: int, fed: Iterable[int]) -> None:
        number = self.check_rows(sequence, start)
        for position, token in enumerate(fed, start):
            number = self._prefix_number(number, token)
            page, row = divmod(position, self.page_size)
            self._rows[sequence.pages[page]][row] = number

    def _prefix_number(self, previous: int, token: int | bytes) -> int:
        number = self._prefix_numbers.setdefault((previous, token), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append((previous, token))
        return number

    def _prefix(self, number: int) -> list[int | bytes]:
        """The salt and the ids that a row was computed from; empty for a row that never was."""
        prefix: list[int | bytes] = []
        while number >= 0:
            number, fresh = self._prefixes[number]
            prefix.append(fresh)
        return prefix[::-1]

    def _scores(self, ids: list[int]) -> list[float]:
        scores = [0.0] * self.vocab_size
        for rank, following in enumerate(self.script(ids)):
            scores[following] = 100.0 - rank
        return scores
