"""Special tokens that a text spells out and that are encoded as plain text, because nobody asked for more.

That is how it should be: a message must not forge a turn. But many old scripts write a chat format by hand
and ask for nothing, since the archived library took such tokens for meant in any case. Their prompts would
go wrong without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property

from .added_tokens import AddedTokenMatcher
from .tokenizer_files import AddedToken

log = logging.getLogger(__name__)

MAX_CHECKED_LETTERS = 2**16
"""Letters of a text: a chat format shows at its beginning."""


class UnparsedSpecialWarning:
    """Tells once, for one tokenizer."""

    def __init__(self, special: Iterable[str]) -> None:
        self._special = tuple(special)
        self._warned = False

    @cached_property
    def _matcher(self) -> AddedTokenMatcher:
        return AddedTokenMatcher(AddedToken(text, 0) for text in self._special)

    def check(self, texts: Iterable[str]) -> None:
        """Warn of the first special token in texts that are encoded as plain ones."""
        if self._warned:
            return
        for text in texts:
            match = (
                next(self._matcher.find(text[:MAX_CHECKED_LETTERS]), None) if isinstance(text, str) else None
            )
            if match is not None:
                self._warned = True
                log.warning(
                    "A text that is encoded holds %r, which is taken for plain text. If it is meant as that "
                    "token, as in a chat format, pass encode_special_tokens=True.",
                    match.token.content,
                )
                return
