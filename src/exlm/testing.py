"""Fakes for tests of generation: a byte tokenizer, and a scripted model that checks every cache read.

They import neither torch nor the generator when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generator.token_sequence import TokenSequence


class ByteTokenizer:
    """Every byte of UTF-8 is a token, and its value is its id."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, with U+FFFD for what is not UTF-8."""
        return bytes(ids).decode(errors="replace")


Script = Callable[[Sequence[int]], Iterable[int]]
"""From the ids so far to the ids that may come next, best first."""


class ScriptedRunner:
    """A model runner that follows a script, over a cache in which each row records what it was computed from.

    A row stands for the salt and all ids up to its own, so that reading a row that does not belong to the
    sequence (wrong page, stale page, bad copy, row never written) fails. `prefill_lengths`,
    `copied_row_counts` and `decode_batch_sizes` have one entry for each such call. `wrap_scores` converts the
    scores that `decode` returns for a sequence, one list for each token, to a tensor for example.
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
        # By prefix number: the number of the prefix without its last id, and that id.
        self._prefixes: list[tuple[int, int | bytes]] = []
        self._prefix_numbers: dict[tuple[int, int | bytes], int] = {}

    def copy_pages(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy the first rows of pages; each copy is (source, target, number of rows)."""
        for source, target, tokens in copies:
            self._rows[target][:tokens] = self._rows[source][:tokens]
            self.copied_row_counts.append(tokens)

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Compute the rows of the ids from `start` to `stop`."""
        self.prefill_lengths.append(stop - start)
        self._write(sequence, start, sequence.ids[start:stop])

    def decode(
        self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Compute `tokens` after the first `past` ids of each sequence; returns scores for every token."""
        self.decode_batch_sizes.append(len(sequences))
        out = []
        for sequence, start, new in zip(sequences, past, tokens, strict=True):
            self._write(sequence, start, new)
            ids = [*sequence.ids[:start], *new]
            out.append(self.wrap_scores([self._scores(ids[: start + n + 1]) for n in range(len(new))]))
        return out

    def invalidate_rows(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Make rows invalid, as a computation that failed halfway does."""
        for position in range(start, stop):
            page, row = divmod(position, self.page_size)
            self._rows[sequence.pages[page]][row] = -1

    def check_rows(self, sequence: TokenSequence, upto: int) -> int:
        """Check the first `upto` rows of a sequence; returns the prefix number of the last one."""
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

    def _write(self, sequence: TokenSequence, start: int, tokens: Iterable[int]) -> None:
        number = self.check_rows(sequence, start)
        for position, token in enumerate(tokens, start):
            number = self._prefix_number(number, token)
            page, row = divmod(position, self.page_size)
            self._rows[sequence.pages[page]][row] = number

    def _prefix_number(self, previous: int, token: int | bytes) -> int:
        number = self._prefix_numbers.setdefault((previous, token), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append((previous, token))
        return number

    def _prefix(self, number: int) -> list[int | bytes]:
        """The salt and the ids that a row was computed from; empty for a row that was never written."""
        prefix: list[int | bytes] = []
        while number >= 0:
            number, last = self._prefixes[number]
            prefix.append(last)
        return prefix[::-1]

    def _scores(self, ids: list[int]) -> list[float]:
        scores = [0.0] * self.vocab_size
        for rank, following in enumerate(self.script(ids)):
            scores[following] = 100.0 - rank
        return scores
