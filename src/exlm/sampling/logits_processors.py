"""Logits processors that depend on a request: CFG, penalties, blocked tokens, bias, DRY, allowed tokens.

`compute_edits` computes from a row's request and text what to change; `apply_edits` changes all rows of a
group together. Rows without edits are not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.sampling_layout import BLOCKED_LOGIT
from .penalties import PenalizedTokens, PenaltyRule, apply_penalties
from .request import SamplingRequest
from .settings import CompiledSettings
from .vocabulary import SamplerVocabulary


def mix_logits(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """scale · log p(positive) + (1 - scale) · log p(negative) for logits (rows, vocab), scales (rows, 1).

    A scale of 1 is the positive prompt alone, 0 the negative one; more than 1 moves away from the negative
    one. What the positive prompt excludes stays excluded.
    """
    mixed = scale * torch.log_softmax(positive, -1) + (1.0 - scale) * torch.log_softmax(negative, -1)
    return mixed.masked_fill_(positive == -torch.inf, -torch.inf)


BITS_PER_WORD = 32


@dataclass(frozen=True)
class LogitsEdits:
    """The changes of one row of logits."""

    penalties: tuple[PenaltyRule, PenalizedTokens] | None
    blocked: Collection[int]
    bias: Tensor | None
    dry_penalties: dict[int, float]
    allowed: Tensor | Collection[int] | None


NO_EDITS = LogitsEdits(None, (), None, {}, None)


def check_bias(bias: Tensor, width: int) -> None:
    """Raise InputError for a bias that is shorter than the vocabulary."""
    if len(bias) < width:
        raise InputError(f"token_bias has {len(bias)} entries; the vocabulary has {width} tokens.")


def compute_edits(
    request: SamplingRequest, compiled: CompiledSettings, vocabulary: SamplerVocabulary, width: int
) -> LogitsEdits:
    """The changes that a row's settings, request and text ask for; `width` counts the tokens."""
    penalties, dry_penalties = None, {}
    if compiled.reads_history:
        request.sync_history()
    if compiled.penalty_rule is not None:
        penalized = request.state.penalized_tokens(compiled.penalty_rule)
        penalties = (compiled.penalty_rule, penalized) if penalized.ids else None
    if compiled.dry_rule is not None:
        breaker_ids = vocabulary.dry_breaker_ids_of(compiled.dry_rule)
        dry_penalties = request.state.dry_penalties(compiled.dry_rule, breaker_ids, width)
    bias, allowed, blocked = request.settings.token_bias, request.allowed, request.blocked
    if penalties is None and not dry_penalties and not blocked and bias is None and allowed is None:
        return NO_EDITS
    return LogitsEdits(penalties, blocked, bias, dry_penalties, allowed)


def apply_edits(x: Tensor, edits: Sequence[LogitsEdits]) -> None:
    """Change contiguous logits (rows, vocab) in place, in the order the steps are defined in."""
    width = x.shape[1]
    penalized = [(row, *edit.penalties) for row, edit in enumerate(edits) if edit.penalties is not None]
    if penalized:
        apply_penalties(x, penalized)
    flat = x.view(-1)
    blocked = [row * width + token for row, edit in enumerate(edits) for token in edit.blocked if 0 <= token < width]
    if blocked:
        flat.index_fill_(0, torch.tensor(blocked).to(x.device, non_blocking=True), BLOCKED_LOGIT)
    if any([edit.bias is not None for edit in edits]):
        _add_biases(x, [edit.bias for edit in edits])
    dry_penalties = {
        row * width + token: penalty for row, edit in enumerate(edits) for token, penalty in edit.dry_penalties.items()
    }
    if dry_penalties:
        offsets = torch.tensor([*dry_penalties.values()], dtype=x.dtype)
        flat[torch.tensor([*dry_penalties]).to(x.device, non_blocking=True)] -= offsets.to(x.device, non_blocking=True)
    for row, edit in enumerate(edits):
        if edit.allowed is not None:
            apply_allowed(x[row], edit.allowed)


def apply_allowed(x: Tensor, allowed: Tensor | Collection[int]) -> None:
    """Exclude from one row of logits (vocab,), in place, all tokens that are not allowed."""
    if isinstance(allowed, Tensor) and allowed.dtype in (torch.bool, torch.int32):
        mask = allowed.to(x.device, non_blocking=True)
        if mask.dtype == torch.int32:
            bits = mask.unsqueeze(-1) >> torch.arange(BITS_PER_WORD, dtype=torch.int32, device=x.device)
            mask = (bits & 1).bool().flatten()[: len(x)]
        known = min(len(mask), len(x))
        x[:known].masked_fill_(~mask[:known], -torch.inf)
        x[known:] = -torch.inf
        return
    ids: list[int] = allowed.tolist() if isinstance(allowed, Tensor) else list(allowed)
    in_vocab = torch.tensor([token for token in ids if 0 <= token < len(x)], dtype=torch.int64)
    positions = in_vocab.to(x.device, non_blocking=True)
    kept = x[positions]
    x.fill_(-torch.inf)
    x[positions] = kept


def _add_biases(x: Tensor, biases: Sequence[Tensor | None]) -> None:
    """Add a bias to each row of logits (rows, vocab) that has one; all rows at once if they share it."""
    if biases[0] is not None and all(bias is biases[0] for bias in biases):
        x, biases = x.unsqueeze(0), biases[:1]
    for rows, bias in zip(x, biases, strict=True):
        if bias is not None:
            rows += bias[: x.shape[-1]].to(x.device, x.dtype, non_blocking=True)
