"""Penalties for repetition: repetition, frequency and presence penalties, and DRY ("don't repeat yourself").

`PenaltyWindow` counts the tokens in a window over the text, token by token, and `apply_penalties` changes the
logits of all rows together. `DryIndex` is a suffix trie of the text, built only as deep as searches go: the
longest earlier copy of the text's end is found with one step for each of its tokens. What counts as a
repetition (breakers, range, lengths) is decided at each search, because settings may change during a job; the
trie itself holds only positions. Neither looks at more of the vocabulary than the tokens of the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.sampling_layout import MAX_DRY_PENALTY


@dataclass(frozen=True)
class PenaltyRule:
    """What repetition costs, and how far back the sampler looks.

    `sustain` tokens count in full (None: all of them), the `decay` tokens before those ever less.
    """

    repetition: float
    frequency: float
    presence: float
    sustain: int | None
    decay: int

    @property
    def decays(self) -> bool:
        """Whether a token's strength changes while the text grows."""
        return self.decay > 0 and self.sustain is not None


@dataclass(frozen=True)
class PenaltyTerms:
    """The tokens of one text to penalise, how strongly, and how often each occurred.

    Strengths are None if all are 1. Tokens in the fading part of the window count only in part.
    """

    ids: array[int]
    strengths: array[float] | None
    counts: array[float]


class WindowCounts:
    """How often each token occurs between two positions of a text; the positions may move."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self.ids = array("q")
        self.counts = array("f")
        self._slots: dict[int, int] = {}

    def move_to(self, ids: Sequence[int], start: int, end: int) -> None:
        """Count ids[start:end] instead; costs as much as the two windows differ."""
        if start == self.start and end == self.end + 1:
            self._add(ids[self.end])
            self.end = end
            return
        if start >= self.end or end <= self.start:
            self.clear(start)
        while self.end < end:
            self._add(ids[self.end])
            self.end += 1
        while self.start > start:
            self.start -= 1
            self._add(ids[self.start])
        while self.start < start:
            self._remove(ids[self.start])
            self.start += 1
        while self.end > end:
            self.end -= 1
            self._remove(ids[self.end])

    def clear(self, start: int = 0) -> None:
        """Count nothing, from this position on."""
        self.start = self.end = start
        del self.ids[:], self.counts[:]
        self._slots.clear()

    def slot(self, token: int) -> int | None:
        """Where a token stands in `ids`."""
        return self._slots.get(token)

    def _add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self.ids)
            self.ids.append(token)
            self.counts.append(1.0)
        else:
            self.counts[slot] += 1.0

    def _remove(self, token: int) -> None:
        slot = self._slots[token]
        self.counts[slot] -= 1.0
        if self.counts[slot] > 0:
            return
        del self._slots[token]
        last_id, last_count = self.ids.pop(), self.counts.pop()
        if last_id != token:
            self.ids[slot], self.counts[slot] = last_id, last_count
            self._slots[last_id] = slot


class PenaltyWindow:
    """The tokens of one text within the penalties' window, kept up to date as the text grows and shrinks."""

    def __init__(self) -> None:
        self._window_counts = WindowCounts()

    def truncate(self, ids: Sequence[int], length: int) -> None:
        """The text is about to lose everything from this position on; `ids` still has it."""
        if self._window_counts.end > length:
            self._window_counts.move_to(ids, min(self._window_counts.start, length), length)

    def terms(self, ids: Sequence[int], rule: PenaltyRule) -> PenaltyTerms:
        """The tokens of the text that a rule penalises."""
        start = 0 if rule.sustain is None else max(0, len(ids) - rule.sustain)
        self._window_counts.move_to(ids, start, len(ids))
        tokens, counts = self._window_counts.ids[:], self._window_counts.counts[:]
        if rule.decay == 0 or start == 0:
            return PenaltyTerms(tokens, None, counts)
        return self._with_decay(ids, rule.decay, tokens, counts)

    def _with_decay(
        self, ids: Sequence[int], decay: int, tokens: array[int], counts: array[float]
    ) -> PenaltyTerms:
        """Add the part of the window where penalties decay, from full strength at its near end to none."""
        start = self._window_counts.start
        strengths = array("f", [1.0]) * len(tokens)
        added: dict[int, int] = {}
        for distance, position in enumerate(range(start - 1, max(-1, start - 1 - decay), -1)):
            token, strength = ids[position], 1.0 - distance / decay
            slot = self._window_counts.slot(token)
            if slot is None:
                slot = added.setdefault(token, len(tokens))
            if slot == len(tokens):
                tokens.append(token)
                strengths.append(strength)
                counts.append(0.0)
            counts[slot] += strength
        return PenaltyTerms(tokens, strengths, counts)


def apply_penalties(logits: Tensor, terms: Sequence[tuple[int, PenaltyRule, PenaltyTerms]]) -> None:
    """Apply each row's penalties to contiguous logits (rows, vocab), in place; `terms` names the rows.

    Ids outside the vocabulary are passed over.
    """
    ids, counts, strengths = array("q"), array("f"), array("f")
    has_decay = any(row_terms.strengths is not None for _, _, row_terms in terms)
    for _, _, row_terms in terms:
        ids.extend(row_terms.ids)
        counts.extend(row_terms.counts)
        if has_decay:
            strengths.extend(row_terms.strengths or array("f", [1.0]) * len(row_terms.ids))
    sizes = torch.tensor([len(row_terms.ids) for _, _, row_terms in terms])
    factor, offset = _penalty_factors([rule for _, rule, _ in terms], sizes, counts, strengths)
    positions = torch.frombuffer(ids, dtype=torch.int64)
    in_vocab = (positions >= 0) & (positions < logits.shape[1])
    if len(terms) > 1 or terms[0][0] > 0:
        starts = torch.tensor([row * logits.shape[1] for row, _, _ in terms])
        positions = positions + starts.repeat_interleave(sizes)
    if not bool(in_vocab.all()):
        positions, factor, offset = (
            positions[in_vocab],
            factor.expand_as(positions)[in_vocab],
            offset[in_vocab],
        )
    _scatter_penalties(logits.view(-1), positions, factor, offset)


def _penalty_factors(
    rules: Sequence[PenaltyRule], sizes: Tensor, counts: array[float], strengths: array[float]
) -> tuple[Tensor, Tensor]:
    """What to divide or multiply by and what to subtract, token by token; one factor if the rows agree."""
    same_rule = all(rule is rules[0] for rule in rules)
    rates = torch.tensor(
        [(r.repetition, r.frequency, r.presence) for r in (rules[:1] if same_rule else rules)]
    )
    if not same_rule:
        rates = rates.repeat_interleave(sizes, 0)
    factor, frequency, presence = rates.unbind(1)
    if strengths:
        strength = torch.frombuffer(strengths, dtype=torch.float32)
        factor, presence = 1.0 + (factor - 1.0) * strength, presence * strength
    return factor, frequency * torch.frombuffer(counts, dtype=torch.float32) + presence


def _scatter_penalties(flat: Tensor, positions: Tensor, factor: Tensor, offset: Tensor) -> None:
    positions = positions.to(flat.device, non_blocking=True)
    factor, offset = factor.to(flat.device, non_blocking=True), offset.to(flat.device, non_blocking=True)
    old = flat[positions]
    flat[positions] = torch.where(old > 0, old / factor, old * factor) - offset


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
