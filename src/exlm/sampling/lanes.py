"""Lanes: which way a row takes through the fused kernels, and its numbers as the kernels read them.

Plain numbers that host and kernels agree on; nothing here needs Triton. A plan that has no lane goes through
`pipeline.py` on the device, too: only slower.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .dry import DryRule
from .plan import Numbers, Plan, Step

WIDEST = 1 << 18  # columns that a program can look at
TILES = 128
RUN = 64  # neighbouring columns of which the largest is known
SORTS = (128, 512, 1024, 2048)  # how many candidates a program sorts: twice the tokens it can be asked for
GATHERED = 1024  # how many it gathers where top-k does not say how many there are

PLACES = {
    "place": 1,  # of the row's logits in the batch
    "draw": 3,  # seed, position, branch
    "target": 1,  # address of mirostat's target, 0 at first
    "first": 1,  # the first target, as the bits of a float64
    "spared": 1,  # address of the tokens that XTC spares
    "listed": 4,  # penalised tokens: address, how many, which one joined, which one left; -1 for none
    "fresh": 2,  # a new list of penalised tokens: where it is, how many there are
    "fading": 2,  # fading tokens: where, how many; their counts and strengths follow
    "blocked": 2,  # where, how many
    "text": 3,  # what DRY searches: address, how many tokens, the last one
    "breakers": 1,  # address of the tokens that end a repetition
    "bias": 1,  # address
    "allowed": 1,  # where the bits are
}
"""The words of a row's head, and how many each has. 0 stands for none; places count from the first head."""

AT = dict(zip(PLACES, accumulate(PLACES.values(), initial=0), strict=False))
HEAD = sum(PLACES.values())

STEPS = (
    "top_p", "top_a", "min_p", "tfs", "typical", "mirostat", "dynamic", "last", "xtc", "skew", "greedy",
)  # fmt: skip
FLAGS = {step: 1 << bit for bit, step in enumerate(STEPS)}
NAMES = (
    *Numbers.__dataclass_fields__, "flags", "mirostat", "repetition", "frequency", "presence",
    "dry_multiplier", "dry_base", "dry_allowed", "dry_longest", "dry_window",
)  # fmt: skip
COLUMNS = {name: column for column, name in enumerate(NAMES)}
TABLE = len(NAMES)

RANKED = frozenset[Step]({"top_p", "top_a", "min_p", "skew"})  # after top-k not worth a kernel of their own
CUTTING = frozenset[Step]({"top_p", "top_a", "min_p", "mirostat"})
BEFORE_MIROSTAT = frozenset[Step]({"tfs", "typical"})


class Lane(NamedTuple):
    """Which kernel a row needs: how many candidates it sorts, for rows without top-k, with every step."""

    sort: int
    wide: bool
    shaped: bool


@lru_cache(maxsize=1024)
def lane_of(plan: Plan, width: int, wanted: int) -> Lane | None:
    """The lane of a plan for a vocabulary; None if it must go another way."""
    needed, wide, shaped = wanted, False, False
    if 0 < plan.top_k < width:
        needed, shaped = max(wanted, plan.top_k), not plan.steps <= RANKED
    elif not plan.greedy:
        wide, shaped = True, not plan.steps <= CUTTING
        cuts = plan.steps & (CUTTING - {"mirostat"} if plan.steps & BEFORE_MIROSTAT else CUTTING)
        if shaped and not cuts:
            return None  # those steps are for few tokens, and nothing makes them few
        needed = max(wanted, GATHERED // 2 if shaped else 0)
    sort = next((size for size in SORTS if size >= 2 * needed), 0)
    return Lane(sort, wide, shaped) if sort and width <= WIDEST else None


@lru_cache(maxsize=64)
def table_of(plans: tuple[Plan, ...], device: torch.device) -> Tensor:
    """The numbers of some plans (rows, TABLE) in float64; kept, because the next step asks for the same."""
    rows = torch.tensor([_numbers(plan) for plan in plans], dtype=torch.float64)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def _numbers(plan: Plan) -> tuple[float, ...]:
    flags = sum(FLAGS[step] for step in plan.steps) + plan.greedy * FLAGS["greedy"]
    rule = plan.penalties
    rates = (1.0, 0.0, 0.0) if rule is None else (rule.repetition, rule.frequency, rule.presence)
    return (*plan.row, flags, plan.mirostat, *rates, *_search(plan.dry))


def _search(rule: DryRule | None) -> tuple[float, ...]:
    if rule is None:
        return (0.0, 1.0, 0.0, 0.0, 0.0)
    return (rule.multiplier, rule.base, rule.allowed, rule.longest, rule.window)
