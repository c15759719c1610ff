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

from ..kernels.sampling_layout import MAX_DRY_PENALTY


@dataclass(frozen=True)
class DryRule:
    """What counts as a repetition, and what it costs.

    `breakers` None means the vocabulary's default set.
    """

    multiplier: float
    base: float
    allowed_length: int
    max_match_length: int
    search_range: int
    breaker_ids: frozenset[int] | None

    def penalty(self, length: int) -> float:
        """The cost of one more token after a match of this length, once."""
        try:
            return min(self.multiplier * self.base ** (length - self.allowed_length), MAX_DRY_PENALTY)
        except OverflowError:
            return MAX_DRY_PENALTY


class _SuffixNode:
    """Where one run of tokens ends in a text, ascending, and the runs that are longer by a token in front.

    The first `sorted` places have been handed on to the longer runs, which happens when they are asked for,
    and what follows the first `counted` has been counted, in the `epoch` of the text.
    """

    __slots__ = (
        "children",
        "end_positions",
        "next_counts",
        "num_counted",
        "num_in_children",
        "truncation_count",
    )

    def __init__(self, places: list[int]) -> None:
        self.end_positions = places
        self.children: _Children = {}
        self.next_counts: dict[int, int] = {}
        self.num_in_children = self.num_counted = self.truncation_count = 0

    def child(self, token: int, ids: list[int], length: int) -> int | _SuffixNode:
        """The runs with a token in front, which there are; `length` is without it."""
        for place in self.end_positions[self.num_in_children :]:
            if place >= length:
                _insert(self.children, ids[place - length], place)
        self.num_in_children = len(self.end_positions)
        return self.children[token]

    def count_next_tokens(self, ids: list[int], truncation_count: int) -> dict[int, int]:
        """How often each token follows, but for the last place, which is the end of the text."""
        if truncation_count != self.truncation_count:
            self.next_counts, self.num_counted, self.truncation_count = {}, 0, truncation_count
        next_counts = self.next_counts
        for place in self.end_positions[self.num_counted : -1]:
            token = ids[place + 1]
            next_counts[token] = next_counts.get(token, 0) + 1
        self.num_counted = len(self.end_positions) - 1
        return next_counts


_Children = dict[int, int | _SuffixNode]
"""Runs by a token; one that occurred but once, as most did, is just a place."""


def _insert(children: _Children, token: int, place: int) -> None:
    known = children.get(token)
    if known is None:
        children[token] = place
    elif isinstance(known, int):
        children[token] = _SuffixNode([known, place])
    else:
        known.end_positions.append(place)


class DryIndex:
    """Where runs of tokens stand in a text that grows at its end."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._root: _Children = {}
        self._truncation_count = 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        for place, token in enumerate(ids, len(self._ids)):
            _insert(self._root, token, place)
        self._ids += ids

    def truncate(self, length: int) -> None:
        """Forget every token from this position on."""
        self._truncation_count += len(self._ids) > length
        while len(self._ids) > length:
            self._remove_last()

    def _remove_last(self) -> None:
        ids, children = self._ids, self._root
        last = len(ids) - 1
        for place in range(last, -1, -1):
            node = children[ids[place]]
            if isinstance(node, int):
                del children[ids[place]]
                break
            in_children = node.num_in_children == len(node.end_positions)
            node.end_positions.pop()
            node.num_in_children = min(node.num_in_children, len(node.end_positions))
            if not in_children:
                break
            children = node.children
        ids.pop()

    def token_costs(self, rule: DryRule, breaker_ids: Container[int], vocab_size: int) -> dict[int, float]:
        """Tokens that would prolong the longest match of the text's end, and what each of them costs.

        A match never contains a breaker or an id outside the vocabulary (`limit`), nor does what follows it,
        and lies within the rule's window. Every occurrence of a continuation counts. Matches longer than
        `rule.longest` count as that long.
        """
        ids, end, min_length = self._ids, len(self._ids) - 1, max(1, rule.allowed_length)
        start = max(0, len(ids) - rule.search_range) if rule.search_range > 0 else 0
        length, longest_node = 0, None
        while length < rule.max_match_length and end - length >= start:
            token = ids[end - length]
            if token in breaker_ids or not 0 <= token < vocab_size:
                break
            node = self._root[token] if longest_node is None else longest_node.child(token, ids, length)
            if isinstance(node, int):
                break
            places = node.end_positions
            if len(places) < 2 or places[-2] < start + length:
                break
            if length + 1 >= min_length and not _has_valid_continuation(
                places, ids, start + length, breaker_ids, vocab_size
            ):
                break
            length, longest_node = length + 1, node
        if longest_node is None or length < min_length:
            return {}
        cost = rule.penalty(length)
        return {
            token: min(cost * count, MAX_DRY_PENALTY)
            for token, count in self._next_token_counts(longest_node, start + length - 1).items()
            if token not in breaker_ids and 0 <= token < vocab_size
        }

    def _next_token_counts(self, node: _SuffixNode, first_position: int) -> Mapping[int, int]:
        """What follows the runs that end at a place or later."""
        ids, places = self._ids, node.end_positions
        if places[0] >= first_position:
            return node.count_next_tokens(ids, self._truncation_count)
        return Counter([ids[place + 1] for place in places[bisect_left(places, first_position) : -1]])


def _has_valid_continuation(
    places: list[int], ids: list[int], first_position: int, breaker_ids: Container[int], vocab_size: int
) -> bool:
    """Whether any of some places but the last, which is the end, is followed by a token that counts."""
    for i in range(len(places) - 2, -1, -1):
        if places[i] < first_position:
            return False
        token = ids[places[i] + 1]
        if token not in breaker_ids and 0 <= token < vocab_size:
            return True
    return False
