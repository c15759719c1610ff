"""DRY: what would repeat, longer and longer, a run of tokens the text already has.

The index remembers where each pair of neighbouring tokens stands, so that finding the longest earlier copy
of the text's end looks only at places that agree in two tokens. Which runs count (breakers, range, lengths)
is decided when asked, because settings may change during a job; the index itself holds only positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

LARGEST_PENALTY = 1e30  # finite, so that a repeated token that is the only one allowed can still be chosen


@dataclass(frozen=True)
class DryRule:
    """What counts as a repetition, and what it costs.

    `breakers` None means the vocabulary's default set.
    """

    multiplier: float
    base: float
    allowed: int
    longest: int
    window: int
    breakers: frozenset[int] | None

    def penalty(self, length: int) -> float:
        """The cost of one more token after a match of this length, once."""
        try:
            return min(self.multiplier * self.base ** (length - self.allowed), LARGEST_PENALTY)
        except OverflowError:
            return LARGEST_PENALTY


class DryIndex:
    """Where pairs of neighbouring tokens stand in a text that grows at its end."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._pairs: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        known = self._ids
        for token in ids:
            if known:
                self._pairs.setdefault((known[-1], token), []).append(len(known))
            known.append(token)

    def truncate(self, length: int) -> None:
        """Forget every token from this position on."""
        ids = self._ids
        while len(ids) > length:
            token = ids.pop()
            if ids:
                places = self._pairs[ids[-1], token]
                places.pop()
                if not places:
                    del self._pairs[ids[-1], token]

    def repeats(self, rule: DryRule, breakers: Container[int], limit: int) -> dict[int, float]:
        """Tokens that would prolong the longest match of the text's end, and what each of them costs.

        A match never contains a breaker or an id outside the vocabulary (`limit`), nor does what follows it,
        and lies within the rule's window. Every occurrence of a continuation counts. Matches longer than
        `rule.longest` count as that long.
        """
        ids, least = self._ids, max(1, rule.allowed)
        start = max(0, len(ids) - rule.window) if rule.window > 0 else 0
        places = self._places(start, least)
        reach = self._unbroken(start, rule.longest, breakers, limit) if places else 0
        if reach < least:
            return {}
        length, follow = self._longest(places, start, least, reach, breakers, limit)
        price = rule.penalty(length)
        return {token: min(price * count, LARGEST_PENALTY) for token, count in follow.items()}

    def _unbroken(self, start: int, longest: int, breakers: Container[int], limit: int) -> int:
        """How many tokens at the end of the text are without a breaker."""
        reach = 0
        for token in reversed(self._ids[max(start, len(self._ids) - longest) :]):
            if token in breakers or not 0 <= token < limit:
                break
            reach += 1
        return reach

    def _longest(
        self, places: list[int], start: int, least: int, reach: int, breakers: Container[int], limit: int
    ) -> tuple[int, Counter[int]]:
        ids, end = self._ids, len(self._ids) - 1
        length, follow = least, Counter[int]()
        suffix = ids[end - length + 1 :]
        for place in places:
            following = ids[place + 1]
            if place - length + 1 < start or ids[place - length + 1 : place + 1] != suffix:
                continue
            if following in breakers or not 0 <= following < limit:
                continue
            longer = length
            while longer < reach and place - longer >= start and ids[place - longer] == ids[end - longer]:
                longer += 1
            if longer > length:
                length, follow = longer, Counter()
                suffix = ids[end - length + 1 :]
            follow[following] += 1
        return length, follow

    def _places(self, start: int, least: int) -> list[int]:
        """Earlier positions, newest first, of the text's last token; of its last pair if matches need two."""
        ids, end = self._ids, len(self._ids) - 1
        if least == 1:
            return [place for place in range(end - 1, start - 1, -1) if ids[place] == ids[end]]
        if end < 1:
            return []
        return self._pairs[ids[end - 1], ids[end]][-2::-1]
