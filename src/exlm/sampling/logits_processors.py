"""Logits processors that depend on a request: penalties, blocked tokens, bias, DRY, allowed tokens.

`compute_edits` works out what to change in each row from its text; `apply_edits` changes all rows that need
it together. A row without edits is never copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.sampling_layout import BLOCKED_LOGIT
from .penalties import PenaltyRule, PenaltyTerms, apply_penalties
from .request import SamplingRequest
from .settings import CompiledSettings
from .vocabulary import SamplerVocabulary


def mix_logits(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """scale · log p(wanted) + (1 - scale) · log p(unwanted) for rows (rows, vocab) and scales (rows, 1).

    1 is the first prompt alone, 0 the second; more than 1 moves away from the second. What the first
    excludes stays excluded.
    """
    mixed = scale * torch.log_softmax(positive, -1) + (1.0 - scale) * torch.log_softmax(negative, -1)
    return mixed.masked_fill_(positive == -torch.inf, -torch.inf)


BITS_PER_WORD = 32


@dataclass(frozen=True)
class LogitsEdits:
    """What to change in one row of logits; None where there is nothing."""

    penalties: tuple[PenaltyRule, PenaltyTerms] | None
    blocked: Collection[int]
    bias: Tensor | None
    dry_costs: dict[int, float]
    allowed: Tensor | Collection[int] | None


NO_EDITS = LogitsEdits(None, (), None, {}, None)


def check_bias(bias: Tensor, width: int) -> None:
    """Raise InputError for a bias that is shorter than the vocabulary."""
    if len(bias) < width:
        raise InputError(f"token_bias has {len(bias)} entries; the vocabulary has {width} tokens.")


def compute_edits(
    request: SamplingRequest, compiled: CompiledSettings, vocabulary: SamplerVocabulary, width: int
) -> LogitsEdits:
    """What a row's settings and text ask to change, NO_EDITS for nothing; `width` counts the tokens."""
    bias = request.settings.token_bias
    needs_history = compiled.penalty_rule is not None or compiled.dry_rule is not None
    if not needs_history and bias is None and request.allowed is None and not request.blocked:
        return NO_EDITS
    penalties, dry_costs = None, {}
    if needs_history and request.history is not None:
        request.state.sync_history(request.history)
    if compiled.penalty_rule is not None:
        terms = request.state.penalty_terms(compiled.penalty_rule)
        penalties = (compiled.penalty_rule, terms) if terms.ids else None
    if compiled.dry_rule is not None:
        breaker_ids = (
            vocabulary.dry_breaker_ids
            if compiled.dry_rule.breaker_ids is None
            else compiled.dry_rule.breaker_ids
        )
        dry_costs = request.state.dry_costs(compiled.dry_rule, breaker_ids, width)
    if (
        penalties is None
        and not dry_costs
        and not request.blocked
        and bias is None
        and request.allowed is None
    ):
        return NO_EDITS
    return LogitsEdits(penalties, request.blocked, bias, dry_costs, request.allowed)


def apply_edits(x: Tensor, edits: Sequence[LogitsEdits]) -> None:
    """Change contiguous logits (rows, vocab) in place, in the order the steps are defined in."""
    width = x.shape[1]
    terms = [(row, *edit.penalties) for row, edit in enumerate(edits) if edit.penalties is not None]
    if terms:
        apply_penalties(x, terms)
    flat = x.view(-1)
    blocked = [
        row * width + token for row, edit in enumerate(edits) for token in edit.blocked if 0 <= token < width
    ]
    if blocked:
        flat.index_fill_(0, _to_device_of(torch.tensor(blocked), x), BLOCKED_LOGIT)
    if any([edit.bias is not None for edit in edits]):
        _add_bias(x, edits)
    dry_costs = [
        (row * width + t, cost) for row, edit in enumerate(edits) for t, cost in edit.dry_costs.items()
    ]
    if dry_costs:
        positions = _to_device_of(torch.tensor([position for position, _ in dry_costs]), x)
        costs = _to_device_of(torch.tensor([cost for _, cost in dry_costs], dtype=x.dtype), x)
        flat[positions] -= costs
    for row, edit in enumerate(edits):
        if edit.allowed is not None:
            apply_allowed(x[row], edit.allowed)


def apply_allowed(x: Tensor, allowed: Tensor | Collection[int]) -> None:
    """Exclude from one row of logits (vocab,), in place, all tokens that are not allowed."""
    if isinstance(allowed, Tensor) and allowed.dtype in (torch.bool, torch.int32):
        mask = (
            _to_device_of(allowed, x)
            if allowed.dtype == torch.bool
            else _unpack_bits(_to_device_of(allowed, x), len(x))
        )
        known = min(len(mask), len(x))
        x[:known].masked_fill_(~mask[:known], -torch.inf)
        x[known:] = -torch.inf
        return
    ids: list[int] = allowed.tolist() if isinstance(allowed, Tensor) else list(allowed)
    positions = _to_device_of(
        torch.tensor([token for token in ids if 0 <= token < len(x)], dtype=torch.int64), x
    )
    kept = x[positions]
    x.fill_(-torch.inf)
    x[positions] = kept


def _add_bias(x: Tensor, edits: Sequence[LogitsEdits]) -> None:
    width = x.shape[1]
    first = edits[0].bias
    if first is not None and all(edit.bias is first for edit in edits):
        x += _to_device_of(first[:width], x).to(x.dtype)
        return
    for row, edit in enumerate(edits):
        if edit.bias is not None:
            x[row] += _to_device_of(edit.bias[:width], x).to(x.dtype)


def _unpack_bits(words: Tensor, width: int) -> Tensor:
    bits = words.unsqueeze(-1) >> torch.arange(BITS_PER_WORD, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().flatten()[:width]


def _to_device_of(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.device, non_blocking=True)
