"""DRY: what would repeat, longer and longer, a run of tokens the text already has.

The index knows where runs of tokens end, sorted by their last token, within those by the one before, and so
on, as deep as anybody looked: finding the longest earlier copy of the text's end costs a step for each of its
tokens, and each place is sorted and counted once. Which runs count (breakers, range, lengths) is decided when
asked, because settings may change during a job; the index itself holds only positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Mapping, Sequence
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


class _Runs:
    """Where one run of tokens ends in a text, ascending, and the runs that are longer by a token in front.

    The first `sorted` places have been handed on to the longer runs, which happens when they are asked for,
    and what follows the first `counted` has been counted, in the `epoch` of the text.
    """

    __slots__ = ("counted", "epoch", "follow", "longer", "places", "sorted")

    def __init__(self, places: list[int]) -> None:
        self.places = places
        self.longer: _Table = {}
        self.follow: dict[int, int] = {}
        self.sorted = self.counted = self.epoch = 0

    def after(self, token: int, ids: list[int], length: int) -> int | _Runs:
        """The runs with a token in front, which there are; `length` is without it."""
        for place in self.places[self.sorted :]:
            if place >= length:
                _put(self.longer, ids[place - length], place)
        self.sorted = len(self.places)
        return self.longer[token]

    def following(self, ids: list[int], epoch: int) -> dict[int, int]:
        """How often each token follows, but for the last place, which is the end of the text."""
        if epoch != self.epoch:
            self.follow, self.counted, self.epoch = {}, 0, epoch
        follow = self.follow
        for place in self.places[self.counted : -1]:
            token = ids[place + 1]
            follow[token] = follow.get(token, 0) + 1
        self.counted = len(self.places) - 1
        return follow


_Table = dict[int, int | _Runs]
"""Runs by a token; one that occurred but once, as most did, is just a place."""


def _put(table: _Table, token: int, place: int) -> None:
    known = table.get(token)
    if known is None:
        table[token] = place
    elif isinstance(known, int):
        table[token] = _Runs([known, place])
    else:
        known.places.append(place)


class DryIndex:
    """Where runs of tokens stand in a text that grows at its end."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._tokens: _Table = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        for place, token in enumerate(ids, len(self._ids)):
            _put(self._tokens, token, place)
        self._ids += ids

    def truncate(self, length: int) -> None:
        """Forget every token from this position on."""
        self._epoch += len(self._ids) > length
        while len(self._ids) > length:
            self._forget_last()

    def _forget_last(self) -> None:
        ids, table = self._ids, self._tokens
        last = len(ids) - 1
        for place in range(last, -1, -1):
            runs = table[ids[place]]
            if isinstance(runs, int):
                del table[ids[place]]
                break
            handed_on = runs.sorted == len(runs.places)
            runs.places.pop()
            runs.sorted = min(runs.sorted, len(runs.places))
            if not handed_on:
                break
            table = runs.longer
        ids.pop()

    def repeats(self, rule: DryRule, breakers: Container[int], limit: int) -> dict[int, float]:
        """Tokens that would prolong the longest match of the text's end, and what each of them costs.

        A match never contains a breaker or an id outside the vocabulary (`limit`), nor does what follows it,
        and lies within the rule's window. Every occurrence of a continuation counts. Matches longer than
        `rule.longest` count as that long.
        """
        ids, end, least = self._ids, len(self._ids) - 1, max(1, rule.allowed)
        start = max(0, len(ids) - rule.window) if rule.window > 0 else 0
        length, found = 0, None
        while length < rule.longest and end - length >= start:
            token = ids[end - length]
            if token in breakers or not 0 <= token < limit:
                break
            runs = self._tokens[token] if found is None else found.after(token, ids, length)
            if isinstance(runs, int):
                break
            places = runs.places
            if len(places) < 2 or places[-2] < start + length:
                break
            if length + 1 >= least and not _goes_on(places, ids, start + length, breakers, limit):
                break
            length, found = length + 1, runs
        if found is None or length < least:
            return {}
        price = rule.penalty(length)
        return {
            token: min(price * count, LARGEST_PENALTY)
            for token, count in self._follow(found, start + length - 1).items()
            if token not in breakers and 0 <= token < limit
        }

    def _follow(self, runs: _Runs, first: int) -> Mapping[int, int]:
        """What follows the runs that end at a place or later."""
        ids, places = self._ids, runs.places
        if places[0] >= first:
            return runs.following(ids, self._epoch)
        return Counter([ids[place + 1] for place in places[bisect_left(places, first) : -1]])


def _goes_on(places: list[int], ids: list[int], first: int, breakers: Container[int], limit: int) -> bool:
    """Whether any of some places but the last, which is the end, is followed by a token that counts."""
    for i in range(len(places) - 2, -1, -1):
        if places[i] < first:
            return False
        token = ids[places[i] + 1]
        if token not in breakers and 0 <= token < limit:
            return True
    return False
