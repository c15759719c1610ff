"""The jobs of the old generators: the dynamic one's, but for what was different about filters and bans."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from .. import InputError, Job, Settings
from ..filters.bits import contains
from ..generator.job import Texts
from ..sampling import Row


class LegacyJob(Job):
    """A job whose filters begin with a healed token: what it adds to the prompt obeys them as well."""

    def prepare(self, serial: int, texts: Texts, vocab: int) -> None:
        """Check it and make what sampling needs, which the old generators change at once."""
        super().prepare(serial, texts, vocab)
        self.begin()

    def next_row(self) -> Row:
        """What the sampler is told of the next token."""
        row = super().next_row()
        if self.output.healing and self.stack is not None and self._healing is not None:
            if not self._filtering:
                self.stack.begin(self.piece(self.prompts[0][-1]))
                self._filtering = True
            mask = self.stack.allowed().mask
            if mask is not None:
                row.allowed = [token for token in self._healing if contains(mask, token)]
        return row


class StreamJob(LegacyJob):
    """A job whose tokens are asked for one by one; `banned_now` may not be the next."""

    banned_now: frozenset[int] = frozenset()

    def prepare(self, serial: int, texts: Texts, vocab: int) -> None:
        """Make what running needs; no token is like the others, because bans may come with any."""
        super().prepare(serial, texts, vocab)
        self.plain = False

    def want(self, probs: bool, top: int, logits: bool) -> None:
        """Have this told of the tokens that are sampled from now on."""
        self.return_probs, self.return_top_tokens, self.return_logits = probs, top, logits
        self.row.want_probs, self.row.want_top = probs or bool(self.hooks), top

    def next_row(self) -> Row:
        """What the sampler is told of the next token."""
        row = super().next_row()
        row.blocked = self.banned_now.union(row.blocked)
        return row


def banned(tokens: Any) -> frozenset[int]:
    """The ids that may not come next: any numbers will do, as in a list or a tensor."""
    try:
        return frozenset(map(index, () if tokens is None else tokens))
    except TypeError as error:
        raise InputError(f"ban_tokens must be a list of token ids, found {tokens!r:.80}.") from error


def filtering(settings: Settings, filters: Sequence[Any] | None, prefer_eos: bool) -> dict[str, Any]:
    """A job's arguments about filters: the call's, or what very old scripts wrote into the settings."""
    if not isinstance(settings, Settings):
        raise InputError(f"gen_settings must be Settings, found {type(settings).__name__}.")
    return {
        "filters": settings.filters if filters is None else filters,
        "filter_prefer_eos": prefer_eos or settings.filter_prefer_eos,
    }
