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
    """How much repetition is penalised, and how far back the sampler looks.

    The last `sustain` tokens count in full (None: all of them), the `decay` tokens before those ever less.
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
class PenalizedTokens:
    """The tokens of one text to penalise, how strongly, and how often each occurred.

    Strengths are None if all are 1. Tokens in the decaying part of the window count only in part.
    """

    ids: array[int]
    strengths: array[float] | None
    counts: array[float]


class PenaltyWindow:
    """Counts the tokens between two positions of a text, which move as the text grows and shrinks."""

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
            self.start = self.end = start
            del self.ids[:], self.counts[:]
            self._slots.clear()
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

    def truncate(self, ids: Sequence[int], length: int) -> None:
        """Leave out everything from this position on, which `ids` still has."""
        if self.end > length:
            self.move_to(ids, min(self.start, length), length)

    def penalized_tokens(self, ids: Sequence[int], rule: PenaltyRule) -> PenalizedTokens:
        """The tokens of the text that a rule penalises."""
        start = 0 if rule.sustain is None else max(0, len(ids) - rule.sustain)
        self.move_to(ids, start, len(ids))
        tokens, counts = self.ids[:], self.counts[:]
        if rule.decay == 0 or start == 0:
            return PenalizedTokens(tokens, None, counts)
        # The part of the window where penalties decay, from full strength at its near end to none.
        strengths = array("f", [1.0]) * len(tokens)
        added: dict[int, int] = {}
        for distance, position in enumerate(range(start - 1, max(-1, start - 1 - rule.decay), -1)):
            token, strength = ids[position], 1.0 - distance / rule.decay
            slot = self._slots.get(token)
            if slot is None:
                slot = added.setdefault(token, len(tokens))
            if slot == len(tokens):
                tokens.append(token)
                strengths.append(strength)
                counts.append(0.0)
            counts[slot] += strength
        return PenalizedTokens(tokens, strengths, counts)

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


def apply_penalties(logits: Tensor, penalized: Sequence[tuple[int, PenaltyRule, PenalizedTokens]]) -> None:
    """Apply penalties to contiguous logits (rows, vocab), in place; each tuple begins with the row.

    Ids outside the vocabulary are ignored.
    """
    ids, counts, strengths = array("q"), array("f"), array("f")
    has_decay = any(tokens.strengths is not None for _, _, tokens in penalized)
    for _, _, tokens in penalized:
        ids.extend(tokens.ids)
        counts.extend(tokens.counts)
        if has_decay:
            strengths.extend(tokens.strengths or array("f", [1.0]) * len(tokens.ids))
    sizes = torch.tensor([len(tokens.ids) for _, _, tokens in penalized])
    factor, offset = _penalty_factors([rule for _, rule, _ in penalized], sizes, counts, strengths)
    positions = torch.frombuffer(ids, dtype=torch.int64)
    in_vocab = (positions >= 0) & (positions < logits.shape[1])
    if len(penalized) > 1 or penalized[0][0] > 0:
        starts = torch.tensor([row * logits.shape[1] for row, _, _ in penalized])
        positions = positions + starts.repeat_interleave(sizes)
    if not bool(in_vocab.all()):
        factor = factor.expand_as(positions)[in_vocab]
        positions, offset = positions[in_vocab], offset[in_vocab]
    flat = logits.view(-1)
    positions, factor, offset = (part.to(flat.device, non_blocking=True) for part in (positions, factor, offset))
    old = flat[positions]
    flat[positions] = torch.where(old > 0, old / factor, old * factor) - offset


def _penalty_factors(
    rules: Sequence[PenaltyRule], sizes: Tensor, counts: array[float], strengths: array[float]
) -> tuple[Tensor, Tensor]:
    """Each token's factor to divide or multiply by, and what to subtract; one factor if the rows agree."""
    same_rule = all(rule is rules[0] for rule in rules)
    rates = torch.tensor([(r.repetition, r.frequency, r.presence) for r in (rules[:1] if same_rule else rules)])
    if not same_rule:
        rates = rates.repeat_interleave(sizes, 0)
    factor, frequency, presence = rates.unbind(1)
    if strengths:
        strength = torch.frombuffer(strengths, dtype=torch.float32)
        factor, presence = 1.0 + (factor - 1.0) * strength, presence * strength
    return factor, frequency * torch.frombuffer(counts, dtype=torch.float32) + presence


@dataclass(frozen=True)
class DryRule:
    """What counts as a repetition, and its penalty; without `breaker_ids`, the vocabulary's breakers do."""

    multiplier: float
    base: float
    allowed_length: int
    max_match_length: int
    search_range: int
    breaker_ids: frozenset[int] | None

    def penalty(self, length: int) -> float:
        """The penalty of one more token after a match of this length that occurred once before."""
        try:
            return min(self.multiplier * self.base ** (length - self.allowed_length), MAX_DRY_PENALTY)
        except OverflowError:
            return MAX_DRY_PENALTY


class _SuffixNode:
    """A node of the trie: one sequence of tokens, with the ascending positions at which it ends.

    Children are the sequences that are longer by one token in front. Searches create them, from the first
    `num_in_children` positions so far. `next_counts` counts the tokens after the first `num_counted` positions; a
    truncation of the text (`truncation_count`) makes it invalid.
    """

    __slots__ = ("children", "end_positions", "next_counts", "num_counted", "num_in_children", "truncation_count")

    def __init__(self, end_positions: list[int]) -> None:
        self.end_positions = end_positions
        self.children: _Children = {}
        self.next_counts: dict[int, int] = {}
        self.num_in_children = self.num_counted = self.truncation_count = 0

    def child(self, token: int, ids: list[int], length: int) -> int | _SuffixNode:
        """The child with a token in front, which must exist; `length` is that of this node's sequence."""
        for position in self.end_positions[self.num_in_children :]:
            if position >= length:
                _insert(self.children, ids[position - length], position)
        self.num_in_children = len(self.end_positions)
        return self.children[token]

    def count_next_tokens(self, ids: list[int], truncation_count: int) -> dict[int, int]:
        """How often each token follows; the last position is the end of the text and does not count."""
        if truncation_count != self.truncation_count:
            self.next_counts, self.num_counted, self.truncation_count = {}, 0, truncation_count
        next_counts = self.next_counts
        for position in self.end_positions[self.num_counted : -1]:
            token = ids[position + 1]
            next_counts[token] = next_counts.get(token, 0) + 1
        self.num_counted = len(self.end_positions) - 1
        return next_counts


_Children = dict[int, int | _SuffixNode]
"""Nodes by token; a sequence that occurred only once, as most did, is just its position."""


def _insert(children: _Children, token: int, position: int) -> None:
    known = children.get(token)
    if known is None:
        children[token] = position
    elif isinstance(known, int):
        children[token] = _SuffixNode([known, position])
    else:
        known.end_positions.append(position)


class DryIndex:
    """Finds repetitions of the end of a text, which grows at its end: a trie of its suffixes."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._root: _Children = {}
        self._truncation_count = 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        for position, token in enumerate(ids, len(self._ids)):
            _insert(self._root, token, position)
        self._ids += ids

    def truncate(self, length: int) -> None:
        """Remove every token from this position on."""
        self._truncation_count += len(self._ids) > length
        while len(self._ids) > length:
            self._remove_last()

    def _remove_last(self) -> None:
        ids, children = self._ids, self._root
        for position in range(len(ids) - 1, -1, -1):
            node = children[ids[position]]
            if isinstance(node, int):
                del children[ids[position]]
                break
            in_children = node.num_in_children == len(node.end_positions)
            node.end_positions.pop()
            node.num_in_children = min(node.num_in_children, len(node.end_positions))
            if not in_children:
                break
            children = node.children
        ids.pop()

    def token_penalties(self, rule: DryRule, breaker_ids: Container[int], vocab_size: int) -> dict[int, float]:
        """The tokens that would prolong the longest match of the text's end, and the penalty of each.

        A match lies within the rule's search range. Neither it nor the token that follows it is a breaker or
        an id outside the vocabulary. Every occurrence of a continuation counts. Matches longer than
        `rule.max_match_length` count as that long.
        """
        ids, end, min_length = self._ids, len(self._ids) - 1, max(1, rule.allowed_length)
        start = max(0, len(ids) - rule.search_range) if rule.search_range > 0 else 0

        def is_allowed(token: int) -> bool:
            return token not in breaker_ids and 0 <= token < vocab_size

        def is_continued(positions: list[int], first: int) -> bool:
            """Whether an allowed token follows any position but the last, which is the end of the text."""
            for i in range(len(positions) - 2, -1, -1):
                if positions[i] < first:
                    return False
                if is_allowed(ids[positions[i] + 1]):
                    return True
            return False

        length, longest_node = 0, None
        while length < rule.max_match_length and end - length >= start:
            token = ids[end - length]
            if not is_allowed(token):
                break
            node = self._root[token] if longest_node is None else longest_node.child(token, ids, length)
            if isinstance(node, int):
                break
            first = start + length  # of the positions at which the match ends within the range
            positions = node.end_positions
            if len(positions) < 2 or positions[-2] < first:
                break
            if length + 1 >= min_length and not is_continued(positions, first):
                break
            length, longest_node = length + 1, node
        if longest_node is None or length < min_length:
            return {}
        penalty, first = rule.penalty(length), start + length - 1
        counts: Mapping[int, int]
        if longest_node.end_positions[0] >= first:
            counts = longest_node.count_next_tokens(ids, self._truncation_count)
        else:
            positions = longest_node.end_positions
            counts = Counter([ids[at + 1] for at in positions[bisect_left(positions, first) : -1]])
        return {token: min(penalty * count, MAX_DRY_PENALTY) for token, count in counts.items() if is_allowed(token)}
