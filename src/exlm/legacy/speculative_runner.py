"""Foresight: a runner that computes guessed tokens along with the one it is asked about.

When the next token asked about is the one it guessed, the answer is there and costs no pass. A caller
notices only the time: every token is still sampled when it is asked for, from the model's own logits,
with the settings and bans of that moment. It guesses for one sequence at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..generator.model_runner import ModelRunner
from ..generator.page_table import PageCopy
from ..generator.token_sequence import TokenSequence

DraftFunction = Callable[[list[int], int], list[int]]
"""From the ids so far to at most so many that may come next."""


class SpeculativeRunner:
    """A runner around another one; `guess` may be changed at any time, None guesses nothing."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.draft: DraftFunction | None = None
        self.num_requested = self.num_drafted = self.num_accepted = 0
        self._computed_ahead: deque[tuple[int, Any]] = deque()  # guessed ids and the logits that follow them
        self._next_position: tuple[TokenSequence | None, int] = (None, 0)  # where the first of them stands

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Duplicate the leading tokens of pages."""
        self.runner.copy_pages(copies)

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Compute keys and values of a stretch of ids."""
        self._computed_ahead.clear()
        self.runner.prefill(sequence, start, stop)

    def decode(
        self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Any:
        """Logits (tokens, vocabulary) for each sequence."""
        if self.draft is None or len(sequences) != 1 or len(tokens[0]) != 1:
            self._computed_ahead.clear()
            return self.runner.decode(sequences, past, tokens)
        return [self._next_logits(sequences[0], past[0], tokens[0][0])]

    def decode_next(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Any) -> None:
        """Nothing runs ahead of what is asked but guesses."""

    def _next_logits(self, sequence: TokenSequence, start: int, token: int) -> Any:
        self.num_requested += 1
        owner, position = self._next_position
        if (
            self._computed_ahead
            and owner is sequence
            and position == start
            and self._computed_ahead[0][0] == token
        ):
            self.num_accepted += 1
            self._next_position = (sequence, start + 1)
            return self._computed_ahead.popleft()[1]
        # The last id that may ever be sampled is never fed, so nothing is guessed for its place.
        max_drafts = sequence.max_length - start - 2
        drafts = (
            self.draft([*sequence.ids[:start], token], max_drafts) if self.draft and max_drafts > 0 else []
        )
        self.num_drafted += len(drafts)
        logits = self.runner.decode([sequence], [start], [[token, *drafts]])[0]
        self._computed_ahead = deque(
            (draft_token, logits[i : i + 1]) for i, draft_token in enumerate(drafts, 1)
        )
        self._next_position = (sequence, start + 1)
        return logits[:1]
