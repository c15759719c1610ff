"""Seats: what the kernels must know of a row that stays the same from token to token, worked out once.

A seat holds as long as nobody assigned to the row or its settings, edited a bias or blocked tokens in place,
or rewound the text; `holds` finds out. It belongs to a text's state, and so do the penalised tokens on the
device that go with it. How far the text has got is not in here.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .edits import check_bias
from .lanes import AT, HEAD
from .listed import NOBODY, TokenList
from .plan import Plan
from .rows import Row
from .transcript import Transcript
from .vocabulary import Vocabulary

CONSTANT = (tuple, frozenset)
ALTERED = -1  # the version of a bias that does not tell when it changes


@dataclass(eq=False)
class Seat:
    """One row's constants: its plan, its head's words as bytes, and what those point to.

    `blocked` are ids within the vocabulary; `watched` are all, if they may change in place.
    """

    editions: tuple[object, object, object]
    plan: Plan
    words: bytes
    blocked: tuple[int, ...]
    watched: tuple[int, ...] | None
    bias: Tensor | None
    version: int
    pointed_to: tuple[Tensor | None, ...]
    listed: TokenList | None
    transcript: Transcript | None

    @property
    def edited(self) -> bool:
        """Whether logits change before they become probabilities."""
        plan = self.plan
        return bool(plan.penalties or plan.dry or self.blocked or self.bias is not None)

    def holds(self, row: Row) -> bool:
        """Whether all this is still so for a row."""
        of_row, of_settings, of_state = self.editions
        return (
            of_row is row.edition
            and of_settings is row.settings.edition
            and of_state is row.state.edition
            and (self.watched is None or self.watched == tuple(row.blocked))
            and (self.bias is None or is_unchanged(self.bias, self.version))
        )


class Seats:
    """Finds seats for rows of one vocabulary on one device."""

    def __init__(self, vocabulary: Vocabulary, width: int, device: torch.device) -> None:
        self.vocabulary, self.width, self.device = vocabulary, width, device
        self._biases: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()

    def make(self, row: Row, before: Seat | None) -> Seat:
        """A new seat; the list of the one before is taken over if it is of the same text."""
        settings, state = row.settings, row.state
        plan = settings.plan()
        seed, branch = state.draws()
        words = [0] * HEAD
        words[AT["draw"]], words[AT["draw"] + 2] = seed, branch
        words[AT["listed"] + 2] = words[AT["listed"] + 3] = NOBODY
        if plan.mirostat:
            (words[AT["first"]],) = struct.unpack("q", struct.pack("d", state.first_target(plan.numbers.tau)))
        bias = settings.token_bias
        there, version = (None, 0) if bias is None else self._there(bias)
        spared = self._spared(plan)
        words[AT["bias"]] = 0 if there is None else there.data_ptr()
        words[AT["spared"]] = 0 if spared is None else spared.data_ptr()
        breakers = self._breakers(plan)
        words[AT["breakers"]] = 0 if breakers is None else breakers.data_ptr()
        same = before if before and before.editions[2] is state.edition else None
        editions = (row.edition, settings.edition, state.edition)
        blocked = tuple(row.blocked)
        return Seat(
            editions=editions,
            plan=plan,
            words=struct.pack(f"{HEAD}q", *words),
            blocked=tuple(token for token in blocked if 0 <= token < self.width),
            watched=None if isinstance(row.blocked, CONSTANT) else blocked,
            bias=bias,
            version=version,
            pointed_to=(there, spared, breakers),
            listed=self._listed(plan, same),
            transcript=self._transcript(plan, same),
        )

    def _listed(self, plan: Plan, before: Seat | None) -> TokenList | None:
        rule = plan.penalties
        if rule is None or rule.fades:
            return None
        old = None if before is None else before.listed
        if old is not None and old.sustain == rule.sustain:
            return old
        return TokenList(rule.sustain, self.width, self.device)

    def _transcript(self, plan: Plan, before: Seat | None) -> Transcript | None:
        if plan.dry is None:
            return None
        old = None if before is None else before.transcript
        return old or Transcript(self.width, self.device)

    def _spared(self, plan: Plan) -> Tensor | None:
        """The tokens that XTC spares."""
        if "xtc" not in plan.steps:
            return None
        return self._mask(self.vocabulary.unexcluded if plan.xtc_ignored is None else plan.xtc_ignored)

    def _breakers(self, plan: Plan) -> Tensor | None:
        """The tokens that end a repetition."""
        if plan.dry is None:
            return None
        return self._mask(self.vocabulary.breakers if plan.dry.breakers is None else plan.dry.breakers)

    def _mask(self, ids: frozenset[int]) -> Tensor | None:
        return self.vocabulary.mask(ids, self.width, self.device) if ids else None

    def _there(self, bias: Tensor) -> tuple[Tensor, int]:
        """A bias on the device, sent again only if it was changed, and its version."""
        check_bias(bias, self.width)
        version = version_of(bias)
        known = self._biases.get(bias)
        if known is None or version == ALTERED or known[1] != version:
            there = bias.detach().to(self.device, torch.float32, copy=True).contiguous()
            known = self._biases[bias] = (there, version)
        return known


def version_of(bias: Tensor) -> int:
    """A number that changes whenever a tensor does; ALTERED if it may have."""
    return ALTERED if bias.is_inference() else bias._version


def is_unchanged(bias: Tensor, version: int) -> bool:
    """Whether a bias is certainly what it was at a version."""
    return version_of(bias) == version != ALTERED


def on_device(allowed: Tensor | Collection[int] | None) -> bool:
    """Whether a mask is where it cannot be packed with what else a row brings along."""
    return isinstance(allowed, Tensor) and allowed.device.type != "cpu"
