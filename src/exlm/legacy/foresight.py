"""Foresight: a runner that computes guessed tokens along with the one it is asked about.

When the next token asked about is the one it guessed, the answer is there and costs no pass. Whoever asks
notices nothing but the time: every token is still sampled when it is asked for, from the model's own logits,
with the settings and bans of that moment. It guesses for one sequence at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..generator.loop import Runner
from ..generator.pages import Copy
from ..generator.sequence import Sequence as Tokens

Guess = Callable[[list[int], int], list[int]]
"""From the ids so far to at most so many that may come next."""


class Foresight:
    """A runner around another one; `guess` may be changed at any time, None guesses nothing."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.guess: Guess | None = None
        self.asked = self.guessed = self.right = 0
        self._known: deque[tuple[int, Any]] = deque()  # guessed ids and the logits that follow them
        self._place: tuple[Tokens | None, int] = (None, 0)  # where the first of them stands

    def copy(self, orders: Iterable[Copy]) -> None:
        """Duplicate the leading tokens of pages."""
        self.runner.copy(orders)

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """Compute keys and values of a stretch of ids."""
        self._known.clear()
        self.runner.prefill(sequence, start, stop)

    def decode(
        self, sequences: Sequence[Tokens], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Any:
        """Logits (tokens, vocabulary) for each sequence."""
        if self.guess is None or len(sequences) != 1 or len(tokens[0]) != 1:
            self._known.clear()
            return self.runner.decode(sequences, past, tokens)
        return [self._answer(sequences[0], past[0], tokens[0][0])]

    def ahead(self, sequences: Sequence[Tokens], past: Sequence[int], tokens: Any) -> None:
        """Nothing runs ahead of what is asked but guesses."""

    def _answer(self, sequence: Tokens, start: int, token: int) -> Any:
        self.asked += 1
        owner, place = self._place
        if self._known and owner is sequence and place == start and self._known[0][0] == token:
            self.right += 1
            self._place = (sequence, start + 1)
            return self._known.popleft()[1]
        # The last id that may ever be sampled is never fed, so nothing is guessed for its place.
        most = sequence.limit - start - 2
        guesses = self.guess([*sequence.ids[:start], token], most) if self.guess and most > 0 else []
        self.guessed += len(guesses)
        answer = self.runner.decode([sequence], [start], [[token, *guesses]])[0]
        self._known = deque((guess, answer[i : i + 1]) for i, guess in enumerate(guesses, 1))
        self._place = (sequence, start + 1)
        return answer[:1]
