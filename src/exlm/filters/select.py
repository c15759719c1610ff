"""SelectFilter: the answer is exactly one of some options, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from .filter import Answer, MaskFilter, Prefix, prefix_text
from .lexicon import lexicon_of
from .paths import Node, Paths
from .prefix import checked_texts


class SelectFilter(MaskFilter):
    """Makes an answer one of the given options; the token that completes an option ends the generation.

    Completing an option ends it even where a longer one goes on. An empty option is chosen by an EOS token.
    """

    def __init__(
        self, model: Any, tokenizer: Any, options: Sequence[str], case_insensitive: bool = False
    ) -> None:
        """`case_insensitive` leaves the case of every letter open; `model` is not used and may be None."""
        super().__init__(model, tokenizer)
        if isinstance(options, str):
            raise InputError(
                f"SelectFilter takes a list of options; for one option write [{options[:80]!r}]."
            )
        self.options = checked_texts(options, "SelectFilter")
        self.case_insensitive = case_insensitive
        self._paths = Paths(lexicon_of(self.codec), self.options, ignore_case=case_insensitive)
        self._place: Node | None = self._paths.root

    def begin(self, prefix_str: Prefix = "") -> None:
        """Start at the beginning of the options."""
        self._place = self._paths.start(prefix_text(prefix_str))

    def feed(self, token: Any) -> None:
        """Go on to where the token leads."""
        self._place = self._paths.follow(self._place, int(token))

    def answer(self) -> Answer:
        """The tokens along the options; those that complete one are the ends."""
        if self._place is None:
            return Answer(self._paths.mask([]))
        steps = self._paths.steps(self._place)
        enough = self.codec.eos_ids if self._place.final else ()
        lexicon = self._paths.lexicon
        last = (number for step in steps if step.node.final for number in lexicon.tokens(*step[:2]).tolist())
        return Answer(self._paths.mask(steps, enough), frozenset((*last, *enough)))
