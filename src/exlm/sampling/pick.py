"""The choice itself: one uniform number into one token, and the most probable tokens for those who ask.

A walk along the candidates until their probabilities add up to the number: the same number always gives the
same token, whatever else is in the batch. Sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .candidates import Candidates, Params
from .order import first_largest, largest, sort_down, take_runs
from .sheets import Told

SHORT = 1.0 - 2.0**-50  # keeps the largest uniform number from rounding up to the end of the walk


@dataclass
class Picked:
    """Of each row: the token, its probability, and the best tokens with theirs (rows, wanted) or None.

    `told` are the tokens on the host, if a kernel writes them there.
    """

    tokens: Tensor
    p: Tensor
    top_tokens: Tensor | None = None
    top_p: Tensor | None = None
    told: Told | None = None


def _walk(p: Tensor, numbers: Tensor) -> Tensor:
    """The first column (rows, 1) at which the sum of p exceeds the number's part of the total."""
    sums = p.cumsum(-1)
    goal = numbers * SHORT * sums[:, -1:]
    return (sums <= goal).sum(-1, keepdim=True).clamp_max_(p.shape[1] - 1)


def pick(c: Candidates, numbers: Tensor, wanted: int, down: Tensor | bool = False) -> Picked:
    """A token of each row for uniform numbers (rows, 1), and `wanted` top tokens.

    The walk is in the order of ids, however candidates were found, since that depends on the device; or, in
    all rows or those where `down` (rows, 1) is true, from the most probable down.
    """
    p, ids = c.p, c.ids
    if ids is not None and down is not True:
        order = ids
        if down is not False:
            order = torch.where(down, torch.arange(ids.shape[1], device=ids.device), ids)
        places = order.argsort(-1)
        p, ids = p.gather(1, places), ids.gather(1, places)
    place = _walk(p, numbers)
    tokens = place if ids is None else ids.gather(1, place)
    picked = Picked(tokens.squeeze(1), p.gather(1, place).squeeze(1))
    if wanted:
        picked.top_tokens, picked.top_p = best(p, ids, wanted)
    return picked


def best(p: Tensor, ids: Tensor | None, wanted: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens; float32, so that ties do not depend on how candidates were found."""
    best, places = largest(p.float(), wanted) if ids is None else sort_down(p.float())
    best, places = best[:, :wanted], places[:, :wanted]
    return fill(places if ids is None else ids.gather(1, places), best, wanted)


def pick_any(x: Tensor, top: Tensor, params: Params, numbers: Tensor, wanted: int) -> Picked:
    """`pick` for rows that exclude nothing, from their logits: first a run of columns, then a column."""
    ends = params.weigh_runs(x, top).cumsum_(-1)
    goal = numbers * SHORT * ends[:, -1:]
    run = (ends <= goal).sum(-1, keepdim=True).clamp_max_(ends.shape[1] - 1)
    before = torch.where(run > 0, ends.gather(1, (run - 1).clamp_min_(0)), 0.0)
    part = (goal - before) / (ends.gather(1, run) - before)
    taken, columns = take_runs(x, run)
    weights = params.weigh(taken, top)
    place = _walk(weights, part.clamp_(0.0, 1.0))
    picked = Picked(columns.gather(1, place).squeeze(1), (weights.gather(1, place) / ends[:, -1:]).squeeze(1))
    if wanted:
        values, ids = largest(x, wanted)
        picked.top_tokens, picked.top_p = fill(ids, params.weigh(values, top) / ends[:, -1:], wanted)
    return picked


def pick_greedy(x: Tensor, wanted: int) -> tuple[Tensor, Picked]:
    """The largest logit of each row (rows,), and its token, the first of equal ones, as a certainty."""
    top, tokens = first_largest(x)
    picked = Picked(tokens, torch.ones(len(x), device=x.device))
    if wanted:
        picked.top_tokens, picked.top_p = fill(tokens.unsqueeze(1), picked.p.unsqueeze(1), wanted)
    return top, picked


def fill(ids: Tensor, p: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """`wanted` ids (rows, wanted): those with a probability first, then others ascending from 0, at 0."""
    missing = wanted - ids.shape[1]
    if missing > 0:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        p = torch.nn.functional.pad(p, (0, missing))
    ids = torch.where(p > 0, ids, -1)
    others = torch.arange(2 * wanted, device=ids.device).expand(len(ids), -1)
    used = (others.unsqueeze(-1) == ids.unsqueeze(1)).any(-1)
    free = torch.sort(used.to(torch.int8), dim=-1, stable=True).indices
    rank = (ids < 0).cumsum(-1) - 1
    return torch.where(ids < 0, free.gather(1, rank.clamp_min(0)), ids), p
