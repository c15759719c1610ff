"""Repetition, frequency and presence penalties: which of the last tokens are penalised, and how much.

`Occurrences` follows a window over the text in step with it, so that a token costs a few dictionary
operations however long the text is; `penalise` changes the logits of all rows in one go. Nothing here looks
at more of the vocabulary than the tokens in question.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
