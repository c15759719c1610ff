"""The direct call: `Sampler.sample` with exllamav2's signature, for scripts that run their own loop.

It goes through the same steps as a batch, one row after the other, and differs only in what such scripts
rely on: they bring the random number, mirostat's target is kept in the settings, and filters are asked here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import BadLogits, InputError
from . import guidance
from .candidates import SLACK, params_of
from .constraint import Constraint
from .edits import apply, check_bias, plan_edits, restrict
from .order import run_maxima, sort_down
from .pick import fill, pick_greedy
from .pipeline import Task, finalists, make_task, move_targets
from .plan import Plan
from .random import uniform
from .rows import INFINITE, NOT_A_NUMBER, NOTHING_ALLOWED, PROBLEMS, Row
from .settings import Settings
from .state import SamplerState
from .vocabulary import Vocabulary
from .walk import choose, gathered, partly_sorted

SORTED_TOP_K = 500  # top-k left its candidates in order, up to here
SORTING = frozenset({"tfs", "typical", "mirostat", "skew"})


@dataclass
class _Pick:
    token: int
    p: float
    top_tokens: Tensor | None
    top_p: Tensor | None
    target: float | None = None


@dataclass(frozen=True)
class _Call:
    """What is the same for all rows of one call."""

    settings: Settings
    vocabulary: Vocabulary
    constraint: Constraint
    blocked: Collection[int]
    wanted: int

    def pick(
        self, x: Tensor, history: list[int], number: float, place: int, prefix: Collection[int] | None
    ) -> _Pick:
        """A token for logits (vocab,) that follow a text; `prefix` are the ids that token healing allows."""
        state = SamplerState(None, 0, history)
        targets = self.settings.mirostat_mu
        state.mirostat_mu = targets[place] if targets and place < len(targets) else None
        row = Row(self.settings, state, blocked=self.blocked)
        plan = self.settings.plan()
        if self.settings.token_bias is not None:
            check_bias(self.settings.token_bias, len(x))
        edits = plan_edits(row, plan, self.vocabulary, len(x))
        x = x.float().clone().unsqueeze(0)
        apply(x, [edits])
        self.constraint.apply(x[0])
        if prefix is not None:
            restrict(x[0], prefix)
        maxima = run_maxima(x)
        _check_largest(float(maxima.amax()))
        task = make_task(0, row, plan, edits, x.shape[1], x.device)
        found = self._greedy(x) if plan.greedy else self._walk(x, maxima, task, number)
        move_targets([task], torch.tensor([found.p], dtype=torch.float64))
        found.target = state.mirostat_mu
        return found

    def _greedy(self, x: Tensor) -> _Pick:
        _, picked = pick_greedy(x, self.wanted)
        return _Pick(int(picked.tokens), 1.0, picked.top_tokens, picked.top_p)

    def _walk(self, x: Tensor, maxima: Tensor, task: Task, number: float) -> _Pick:
        ((_, c),) = finalists(x, [task], self.vocabulary, maxima)
        p = c.p if c.ids is None else torch.zeros_like(x, dtype=c.p.dtype).scatter_(1, c.ids, c.p)
        down, ids = sort_down(p)
        members, chances = _in_order(x, p[0], ids[0], task.plan, self.wanted)
        place = choose(chances, number**task.plan.numbers.skew_power)
        while p[0, members[place]] == 0:
            place -= 1
        token = int(members[place])
        found = _Pick(token, float(p[0, token]), None, None)
        if self.wanted:
            found.top_tokens, found.top_p = fill(ids[:, : self.wanted], down[:, : self.wanted], self.wanted)
        return found


def _in_order(x: Tensor, p: Tensor, sorted_ids: Tensor, plan: Plan, wanted: int) -> tuple[Tensor, Tensor]:
    """The ids of the candidates as the old library walked along them, and how far each step went."""
    if plan.steps & SORTING or 0 < plan.top_k <= SORTED_TOP_K:
        members = sorted_ids[: int((p > 0).sum())]
        return members, p[members]
    if plan.steps & {"top_a", "min_p"} and not plan.top_k and "top_p" not in plan.steps:
        members, chances = _above_thresholds(x, p, plan)
    else:
        members = (
            (p > 0).nonzero().squeeze(1) if plan.top_k or "top_p" in plan.steps else torch.arange(len(p))
        )
        chances = p[members]
    if wanted:
        places = torch.tensor(partly_sorted(chances.float().tolist(), wanted))
        members, chances = members[places], chances[places]
    return members, chances


def _above_thresholds(x: Tensor, p: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """`_in_order` after top-a and min-p, with a candidate below the threshold if one was walked past."""
    before = params_of([plan], x.device).weigh(x, x.amax(-1, keepdim=True))[0]
    top = 1.0 / float(before.sum())
    least = max(plan.numbers.top_a * top, plan.numbers.min_p) * (1.0 - SLACK)
    members, extra = gathered(before >= least)
    # What else happened to the candidates is a power of their ratios, or (XTC) spared such improbable ones.
    best = before.argmax()
    late = p[best] * before[extra] ** (1.0 / plan.numbers.last)
    return torch.cat((members, extra)), torch.cat((p[members], late))


_vocabularies: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """What the sampler knows of a tokenizer, kept as long as the tokenizer is."""
    if tokenizer is None:
        return Vocabulary()
    try:
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = Vocabulary(tokenizer)
        return _vocabularies[tokenizer]
    except TypeError:  # an object that cannot be a weak key
        return Vocabulary(tokenizer)


@torch.no_grad()
def sample(
    logits: Tensor,
    settings: Settings,
    sequence_ids: Tensor,
    random: float,
    tokenizer: Any,
    prefix_token: Tensor | None = None,
    return_top_tokens: int = 0,
    blocked_tokens: Collection[int] | None = None,
    filters: Sequence[Any] | None = None,
    filter_prefer_eos: bool = False,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Pick a token for each row of logits (rows, 1, vocab) that follow sequence_ids (rows, n).

    `random` in [0, 1) selects the first row's token; further rows derive theirs from it. `prefix_token`
    (rows, 1) restricts each row to tokens that begin with that token's text. With `cfg_scale` two rows come
    in and one goes out. Returns tokens (rows, 1), top tokens and their probabilities (rows, 1, k), on the
    meta device if none are requested, the tokens' final probabilities (rows, 1), and whether a filter ended
    the text; all on the CPU. `mirostat_mu` of the settings is read and written, a number for each row. `sync`
    is accepted and has no effect.
    """
    x = _checked(logits, settings, sequence_ids, random, prefix_token)
    filters = (settings.filters if filters is None else filters) or ()
    if filters and len(x) > 1:
        raise InputError("Filters not implemented for batch size > 1.")
    prefer_eos = bool(filters) and (filter_prefer_eos or settings.filter_prefer_eos)
    vocabulary = vocabulary_of(tokenizer)
    x = x[:, : vocabulary.width(x.shape[1])]
    call = _Call(
        settings,
        vocabulary,
        Constraint(filters, tokenizer.eos_token_id if prefer_eos else None),
        blocked_tokens or (),
        min(return_top_tokens, x.shape[1]),
    )
    picks = []
    for place, (row, history) in enumerate(zip(x, sequence_ids.tolist(), strict=False)):
        number = random if place == 0 else uniform(_bits(random), place)
        prefix = None
        if prefix_token is not None:
            prefix = tokenizer.get_prefix_id_to_ids_dict()[int(prefix_token[place, 0])]
        picks.append(call.pick(row, history, number, place, prefix))
    if settings.mirostat:
        settings.mirostat_mu = [pick.target or 0.0 for pick in picks]
    ended = any(call.constraint.ended_by(pick.token) for pick in picks)
    tokens = torch.tensor([[pick.token] for pick in picks])
    return tokens, *_tops(picks), torch.tensor([[pick.p] for pick in picks]), ended


def _tops(picks: list[_Pick]) -> tuple[Tensor, Tensor]:
    tops = [(p.top_tokens, p.top_p) for p in picks if p.top_tokens is not None and p.top_p is not None]
    if not tops:
        empty = (len(picks), 1, 0)
        return torch.empty(empty, dtype=torch.long, device="meta"), torch.empty(empty, device="meta")
    tokens, p = torch.stack([ids for ids, _ in tops]), torch.stack([p for _, p in tops])
    return tokens, p.float()


def _checked(
    logits: Tensor, settings: Settings, sequence_ids: Tensor, number: float, prefix_token: Tensor | None
) -> Tensor:
    """The rows of logits (rows, vocab) to pick from, mixed if they are guided."""
    if logits.dim() != 3 or logits.shape[1] != 1:
        raise InputError(
            f"Logits tensor is incorrect shape, must be (bsz, 1, vocab_size): found {tuple(logits.shape)}."
        )
    if sequence_ids.dim() != 2 or len(sequence_ids) != len(logits):
        raise InputError(
            f"sequence_ids must be ({len(logits)}, n), like the logits, found {tuple(sequence_ids.shape)}."
        )
    if prefix_token is not None and len(prefix_token) != len(logits):
        raise InputError("Prefix token list doesn't match batch shape.")
    if not 0.0 <= number <= 1.0:
        raise InputError(f"random must be from 0 to 1, found {number!r}.")
    x = logits[:, 0].float().cpu()
    if settings.cfg_scale is None:
        return x
    if len(x) != 2:
        raise InputError(f"CFG requires logits to be bsz 2, found {len(x)}.")
    return guidance.mix(x[:1], x[1:], torch.tensor([[float(settings.cfg_scale)]]))


def _check_largest(logit: float) -> None:
    if not math.isfinite(logit):
        code = NOT_A_NUMBER if math.isnan(logit) else INFINITE if logit > 0 else NOTHING_ALLOWED
        raise BadLogits(PROBLEMS[code])


def _bits(number: float) -> int:
    """The bits of a float, as a seed for the rows that derive their number from it."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", number))
    return int(bits)
