"""The sampler's view of a tokenizer: how many ids are tokens, and which of them DRY and XTC leave alone.

The sets are built when first needed, because reading every piece takes a moment. Any object with the few
methods below serves as a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from .penalties import DryRule
from .settings import CompiledSettings

DRY_BREAKER_CHARACTERS = '.,!?<>[](){}"\n\t'


class SamplerTokenizer(Protocol):
    """The part of a tokenizer that the sampler needs."""

    @property
    def extended_id_to_piece(self) -> Mapping[int, str]:
        """The special tokens."""

    def get_vocab_size(self) -> int:
        """One more than the highest id."""

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> Sequence[str]:
        """By id, what a token adds to a text."""


class SamplerVocabulary:
    """The ids of a model that are tokens, and those that end a repetition or are never excluded by XTC."""

    def __init__(self, tokenizer: SamplerTokenizer | None = None, size: int | None = None) -> None:
        """Ids below `size`, or those the tokenizer knows; without both, every column of logits is a token."""
        self._tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size() if size is None and tokenizer is not None else size
        self._masks: dict[tuple[frozenset[int], int, torch.device], Tensor] = {}

    def width(self, columns: int) -> int:
        """How many of a model's columns are tokens; what lies beyond is padding."""
        return columns if self.size is None else min(columns, self.size)

    @cached_property
    def dry_breaker_ids(self) -> frozenset[int]:
        """Tokens with punctuation, brackets, quotes, line breaks or tabs, and all special tokens."""
        return self._ids_containing(DRY_BREAKER_CHARACTERS)

    @cached_property
    def xtc_exempt_ids(self) -> frozenset[int]:
        """Tokens with a line break, and all special tokens."""
        return self._ids_containing("\n")

    def dry_breaker_ids_of(self, rule: DryRule) -> frozenset[int]:
        """Tokens that end a repetition: those of a rule, or the default."""
        return self.dry_breaker_ids if rule.breaker_ids is None else rule.breaker_ids

    def xtc_exempt_ids_of(self, compiled: CompiledSettings) -> frozenset[int]:
        """Tokens that XTC never excludes: those of some settings, or the default."""
        return self.xtc_exempt_ids if compiled.xtc_exempt_ids is None else compiled.xtc_exempt_ids

    def mask(self, ids: frozenset[int], width: int, device: torch.device) -> Tensor:
        """A set of ids as booleans (width,); cached, because few different sets are used."""
        key = (ids, width, device)
        if key not in self._masks:
            if len(self._masks) > 64:
                self._masks.clear()
            mask = torch.zeros(width, dtype=torch.bool)
            mask[[token for token in ids if 0 <= token < width]] = True
            self._masks[key] = mask.to(device)
        return self._masks[key]

    def _ids_containing(self, characters: str) -> frozenset[int]:
        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            return frozenset()
        wanted = set(characters)
        pieces = tokenizer.get_id_to_piece_list()
        found = {token for token, piece in enumerate(pieces) if not wanted.isdisjoint(piece)}
        return frozenset(found | set(tokenizer.extended_id_to_piece))
