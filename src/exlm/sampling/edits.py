"""What happens to logits before they become probabilities: penalties, blocks, bias, DRY, allowed tokens.

First it is worked out, from each row's text, what there is to change; then rows that need it are changed,
all together. A row whose settings ask for nothing, or whose text gives no reason, is never copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .penalties import PenaltyRule, Terms, penalise
from .plan import Plan
from .rows import Row
from .vocabulary import Vocabulary

BLOCKED = -1e30  # not -inf: where all else is excluded, a blocked token is better than none
BITS = 32


@dataclass(frozen=True)
class Edits:
    """What to change in one row of logits; None where there is nothing."""

    penalties: tuple[PenaltyRule, Terms] | None
    blocked: Collection[int]
    bias: Tensor | None
    repeats: dict[int, float]
    allowed: Tensor | Collection[int] | None

    def __bool__(self) -> bool:
        return bool(
            self.penalties is not None
            or self.blocked
            or self.bias is not None
            or self.repeats
            or self.allowed is not None
        )


NO_EDITS = Edits(None, (), None, {}, None)


def check_bias(bias: Tensor, width: int) -> None:
    """Raise InputError for a bias that is shorter than the vocabulary."""
    if len(bias) < width:
        raise InputError(f"token_bias has {len(bias)} entries; the vocabulary has {width} tokens.")


def plan_edits(row: Row, plan: Plan, vocabulary: Vocabulary, width: int) -> Edits:
    """What a row's settings and text ask to change; `width` counts the tokens."""
    bias = row.settings.token_bias
    texts = plan.penalties is not None or plan.dry is not None
    if not texts and bias is None and row.allowed is None and not row.blocked:
        return NO_EDITS
    penalties, repeats = None, {}
    if texts and row.history is not None:
        row.state.follow(row.history)
    if plan.penalties is not None:
        terms = row.state.penalty_terms(plan.penalties)
        penalties = (plan.penalties, terms) if terms.ids else None
    if plan.dry is not None:
        breakers = vocabulary.breakers if plan.dry.breakers is None else plan.dry.breakers
        repeats = row.state.repeats(plan.dry, breakers, width)
    return Edits(penalties, row.blocked, bias, repeats, row.allowed)


def apply(x: Tensor, edits: Sequence[Edits]) -> None:
    """Change contiguous logits (rows, vocab) in place, in the order the steps are defined in."""
    width = x.shape[1]
    terms = [(row, *edit.penalties) for row, edit in enumerate(edits) if edit.penalties is not None]
    if terms:
        penalise(x, terms)
    flat = x.view(-1)
    blocked = [
        row * width + token for row, edit in enumerate(edits) for token in edit.blocked if 0 <= token < width
    ]
    if blocked:
        flat.index_fill_(0, _to(torch.tensor(blocked), x), BLOCKED)
    _add_bias(x, edits)
    repeats = [(row * width + t, cost) for row, edit in enumerate(edits) for t, cost in edit.repeats.items()]
    if repeats:
        places = _to(torch.tensor([place for place, _ in repeats]), x)
        costs = _to(torch.tensor([cost for _, cost in repeats], dtype=x.dtype), x)
        flat[places] -= costs
    for row, edit in enumerate(edits):
        if edit.allowed is not None:
            restrict(x[row], edit.allowed)


def restrict(x: Tensor, allowed: Tensor | Collection[int]) -> None:
    """Exclude from one row of logits (vocab,), in place, all tokens that are not allowed."""
    if isinstance(allowed, Tensor) and allowed.dtype in (torch.bool, torch.int32):
        mask = _to(allowed, x) if allowed.dtype == torch.bool else _unpack(_to(allowed, x), len(x))
        known = min(len(mask), len(x))
        x[:known].masked_fill_(~mask[:known], -torch.inf)
        x[known:] = -torch.inf
        return
    ids: list[int] = allowed.tolist() if isinstance(allowed, Tensor) else list(allowed)
    places = _to(torch.tensor([token for token in ids if 0 <= token < len(x)], dtype=torch.int64), x)
    kept = x[places]
    x.fill_(-torch.inf)
    x[places] = kept


def _add_bias(x: Tensor, edits: Sequence[Edits]) -> None:
    width = x.shape[1]
    first = edits[0].bias
    if first is not None and all(edit.bias is first for edit in edits):
        x += _to(first[:width], x).to(x.dtype)
        return
    for row, edit in enumerate(edits):
        if edit.bias is not None:
            x[row] += _to(edit.bias[:width], x).to(x.dtype)


def _unpack(words: Tensor, width: int) -> Tensor:
    bits = words.unsqueeze(-1) >> torch.arange(BITS, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().flatten()[:width]


def _to(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.device, non_blocking=True)
