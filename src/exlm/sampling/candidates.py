"""Candidates: the tokens still in play, with their probabilities, for a group of rows.

Two shapes of one thing. *Narrow*: the few most probable tokens of each row, in order, found without sorting
the vocabulary. *Wide*: a column for each token of the vocabulary, for rows that exclude nothing, or on
devices where asking how many remain would stall. The steps after this do not care which. Probabilities are
float64: sums of different lengths then agree far beyond any threshold, so a row's tokens do not depend on
its neighbours'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .order import largest, run_sums, sort_down
from .plan import Numbers, Plan

COLUMNS = tuple(Numbers.__dataclass_fields__)
ORDERED = frozenset({"top_p", "tfs", "skew"})  # steps that need descending probabilities
SLACK = 1e-6  # a threshold is met by what float32 logits cannot tell from it
TFS_LEAST = 1e-8  # tail-free sampling drops less probable tokens before it looks at the tail
SIZES = (64, 512, 4096)  # how many candidates are tried before the whole vocabulary
CACHED = 1 << 19  # numbers that fit a CPU's cache; larger temporary tensors are made piece by piece


class Params:
    """The numbers of a group's plans as columns (rows, 1), or (1, 1) where the rows agree."""

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        table = torch.tensor([plan.row for plan in plans], dtype=torch.float64).to(device, non_blocking=True)
        self._columns = dict(zip(COLUMNS, torch.split(table, 1, 1), strict=True))
        self._cooling = self._columns["temperature"].float()
        self.smooth = any(plan.numbers.smoothing > 0 for plan in plans)

    def __getitem__(self, name: str) -> Tensor:
        column: Tensor = self._columns[name]
        return column

    def weigh(self, x: Tensor, top: Tensor) -> Tensor:
        """Unnormalised probabilities of logits, 1 for a logit equal to `top`; in float64."""
        below = x.double() - top
        if self.smooth:
            smoothing = self["smoothing"]
            below = torch.where(smoothing > 0, -smoothing * below * below, below)
        return below.div_(self["temperature"]).exp_()

    def weigh_runs(self, x: Tensor, top: Tensor) -> Tensor:
        """Sums of the weights of every 64 neighbouring tokens (rows, runs); the weights in float32."""
        step = max(1, CACHED // x.shape[1]) if x.device.type == "cpu" else len(x)
        shared = len(self._cooling) == 1
        sums = []
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            below = x[rows] - top[rows]
            own = slice(None) if shared else rows
            if self.smooth:
                smoothing = self["smoothing"][own].float()
                below = torch.where(smoothing > 0, -smoothing * below * below, below)
            sums.append(run_sums(below.div_(self._cooling[own]).exp_()))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def depth(self, log_ratio: Tensor) -> Tensor:
        """How far below the largest logit a weight of exp(log_ratio) lies, with room to spare."""
        deep = (-log_ratio).clamp_min(0.0) * self["temperature"]
        if self.smooth:
            smoothing = self["smoothing"]
            deep = torch.where(smoothing > 0, (deep / smoothing.clamp_min(1e-30)).sqrt(), deep)
        return deep * (1.0 + 1e-5) + 1e-3


def params_of(plans: Sequence[Plan], device: torch.device) -> Params:
    """The parameters of some rows; remembered for rows that all have the same plan."""
    if all(plan is plans[0] for plan in plans):
        return _shared_params(plans[0], device)
    return Params(plans, device)


@lru_cache(maxsize=256)
def _shared_params(plan: Plan, device: torch.device) -> Params:
    return Params((plan,), device)


@dataclass
class Candidates:
    """Probabilities `p` (rows, k) and token `ids` (rows, k); ids None if a column is a token.

    A probability of 0 means out. `ordered` says that p descended, and ids ascended among equals, before steps
    that leave gaps.
    """

    p: Tensor
    ids: Tensor | None
    ordered: bool

    def order(self) -> None:
        """Put the most probable first, if that is not so yet."""
        if self.ordered:
            return
        self.p, columns = sort_down(self.p)
        self.ids = columns if self.ids is None else self.ids.gather(1, columns)
        self.ordered = True

    def some(self, rows: list[int]) -> Candidates:
        """Some of the rows."""
        return Candidates(self.p[rows], None if self.ids is None else self.ids[rows], self.ordered)

    def keep(self, mask: Tensor, active: Tensor | None) -> None:
        """Drop what is not in the mask and share its probability out, in the active rows (None: all)."""
        if active is not None:
            mask = mask | ~active
        kept = torch.where(mask, self.p, 0.0)
        total = kept.sum(-1, keepdim=True)
        self.p = kept / (total if active is None else torch.where(active, total, 1.0))


def most_probable(x: Tensor, plans: Sequence[Plan], params: Params, maxima: Tensor) -> Candidates:
    """The top-k of each row, k as its plan says; for rows that all have one."""
    count = min(max(plan.top_k for plan in plans), x.shape[1])
    values, ids = largest(x, count, maxima)
    weights = params.weigh(values, values[:, :1])
    if any(plan.top_k < count for plan in plans):
        weights = torch.where(torch.arange(count, device=x.device) < params["top_k"], weights, 0.0)
    return Candidates(weights / weights.sum(-1, keepdim=True), ids, True)


def everything(x: Tensor, plans: Sequence[Plan], params: Params) -> Candidates:
    """Every token of the vocabulary."""
    ids, ordered = None, any(plan.steps & ORDERED for plan in plans)
    if ordered:
        x, ids = sort_down(x)
    weights = params.weigh(x, x.amax(-1, keepdim=True))
    return Candidates(weights / weights.sum(-1, keepdim=True), ids, ordered)


def everything_of(
    x: Tensor, rows: Sequence[int], plans: Sequence[Plan]
) -> Iterator[tuple[list[int], Candidates]]:
    """`everything` for some of the rows, as many at a time as is good for a CPU."""
    step = max(1, CACHED // x.shape[1]) if x.device.type == "cpu" else len(rows)
    for start in range(0, len(rows), step):
        members = list(rows[start : start + step])
        some = [plans[row] for row in members]
        yield members, everything(_rows(x, members), some, params_of(some, x.device))


def needs_total(plan: Plan) -> bool:
    """Whether a plan asks how probable tokens are among all; min-p alone compares with the most probable."""
    return "min_p" not in plan.steps or bool(plan.steps & {"top_p", "top_a"})


def floor(plan: Plan, width: int, target: float | None) -> float:
    """A logarithm of a probability below which no token can remain; -inf if there is none.

    It is relative to all tokens if `needs_total`, else to the most probable. Dropping what lies below must
    not change what the steps decide about the rest: top-p leaves out more than all of it together, and no
    earlier step sums over it. `target` is mirostat's.
    """
    steps, numbers = plan.steps, plan.numbers
    if not needs_total(plan):
        return math.log(numbers.min_p)
    if "top_p" in steps:
        return math.log((1.0 - numbers.top_p) / width)
    if "tfs" in steps:
        return math.log(TFS_LEAST)
    if "mirostat" in steps and target is not None and not steps & {"top_a", "typical"}:
        return -target * math.log(2.0)
    return -math.inf


def possible(
    x: Tensor, plans: Sequence[Plan], params: Params, floors: Sequence[float], maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    """The tokens of each row above its floor, rows with similarly many together; for the CPU.

    The rows must agree on `needs_total`.
    """
    top = maxima.amax(-1, keepdim=True)
    total = params.weigh_runs(x, top).sum(-1, keepdim=True) if needs_total(plans[0]) else None
    ratios = torch.tensor(floors, dtype=torch.float64).unsqueeze(1)
    least = top - params.depth(ratios if total is None else ratios + total.log())
    left = list(range(len(x)))
    for size in SIZES:
        if not left or size * 4 > x.shape[1]:
            break
        found, done = _best(size, left, x, plans, maxima, top, least, total)
        if any(done):
            rows = [row for row, complete in zip(left, done, strict=True) if complete]
            yield rows, found if all(done) else found.some([i for i, complete in enumerate(done) if complete])
            left = [row for row, complete in zip(left, done, strict=True) if not complete]
    yield from everything_of(x, left, plans)


def _best(
    size: int,
    rows: list[int],
    x: Tensor,
    plans: Sequence[Plan],
    maxima: Tensor,
    top: Tensor,
    least: Tensor,
    total: Tensor | None,
) -> tuple[Candidates, list[bool]]:
    """The `size` most probable tokens of some rows, and for which of them that is all they can need."""
    some = [plans[row] for row in rows]
    params = params_of(some, x.device)
    values, ids = largest(_rows(x, rows), size, _rows(maxima, rows))
    least = _rows(least, rows)
    weights = torch.where(values >= least, params.weigh(values, _rows(top, rows)), 0.0)
    sums = weights.sum(-1, keepdim=True)
    p = weights / (sums if total is None else _rows(total, rows))
    complete = values[:, -1:] < least
    if total is not None:
        complete |= p.sum(-1, keepdim=True) >= params["top_p"]
    return Candidates(p, ids, True), complete.squeeze(1).tolist()


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    return x if len(rows) == len(x) else x[rows]
