"""From edited logits to picks, for rows that go through the same kind of work together.

A kind says how candidates are found: not at all (greedy), by top-k, above a floor that cheap sums give, or
the whole vocabulary. After that every kind takes the same steps in the same order; a step is run if one of
the rows uses it, and the others pass through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import candidates
from .candidates import ORDERED, Candidates, Params, params_of
from .edits import Edits
from .mirostat import mirostat, moved
from .order import run_maxima
from .pick import Picked, pick, pick_any, pick_greedy
from .plan import Plan, Step
from .rows import INFINITE, NOT_A_NUMBER, NOTHING_ALLOWED, Row
from .temperature import dynamic, last
from .truncation import TRUNCATIONS
from .vocabulary import Vocabulary
from .xtc import xtc

SMALL = 512  # a vocabulary up to here is worked on whole

Kind = Literal["greedy", "plain", "top_k", "near", "far", "open"]
Company = tuple[Kind, bool, bool, bool]


class Task(NamedTuple):
    """A row with what its settings amount to. `place` is its number in the batch.

    Tasks with the same `company`, which begins with the kind, are worked on together.
    """

    place: int
    row: Row
    plan: Plan
    edits: Edits
    floor: float
    company: Company

    @property
    def kind(self) -> Kind:
        """How candidates are found."""
        return self.company[0]


def make_task(place: int, row: Row, plan: Plan, edits: Edits, width: int, device: torch.device) -> Task:
    """Decide how a row's candidates are found; `width` counts the tokens."""
    target = None
    may_ask = device.type == "cpu"
    if may_ask and "mirostat" in plan.steps:
        target = float(row.state.target(row.position, plan.numbers.tau, device))
    way = _way if target is None else _way.__wrapped__  # no two targets are alike
    floor, company = way(plan, width, may_ask, target, bool(edits))
    return Task(place, row, plan, edits, floor, company)


@lru_cache(maxsize=1024)
def _way(plan: Plan, width: int, may_ask: bool, target: float | None, edited: bool) -> tuple[float, Company]:
    """A row's floor and company; `may_ask` if the device tells without a stall what lies above a floor."""
    floor = candidates.floor(plan, width, target) if may_ask else -math.inf
    kind: Kind = "open"
    if plan.greedy:
        kind = "greedy"
    elif 0 < plan.top_k < width:
        kind = "top_k"
    elif not plan.steps:
        kind = "plain"
    elif floor > -math.inf:
        kind = "far" if candidates.needs_total(plan) else "near"
    # Sorting the vocabulary is so slow that no row should have to wait for another's.
    sorts = kind == "open" and bool(plan.steps & ORDERED), kind == "open" and "typical" in plan.steps
    return floor, (kind, edited, *sorts)


def choose(x: Tensor, tasks: Sequence[Task], vocabulary: Vocabulary, wanted: int) -> Picked:
    """Pick a token for every row of logits (rows, vocab) that are not changed any more; all of one kind.

    Rows without a usable logit get a negative token. Mirostat's targets move on.
    """
    if tasks[0].kind == "greedy":
        top, picked = pick_greedy(x, wanted)
        picked.tokens = failures(top, picked.tokens)
        move_targets(tasks, picked.p)
        return picked
    maxima = run_maxima(x)
    top = maxima.amax(-1, keepdim=True)
    if tasks[0].kind == "plain" and x.shape[1] > SMALL:
        params = params_of([task.plan for task in tasks], x.device)
        picked = pick_any(x, top, params, numbers_of(tasks, x.device), wanted)
    else:
        parts = [
            (members, _pick_candidates(c, [tasks[member] for member in members], wanted))
            for members, c in finalists(x, tasks, vocabulary, maxima)
        ]
        picked = parts[0][1] if len(parts) == 1 else joined(parts, x.device)
    picked.tokens = failures(top.squeeze(1), picked.tokens)
    move_targets(tasks, picked.p)
    return picked


def finalists(
    x: Tensor, tasks: Sequence[Task], vocabulary: Vocabulary, maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    """The candidates of rows after every step, some rows at a time: their numbers among the tasks first."""
    for members, c in _found(x, tasks, maxima):
        some = [tasks[member] for member in members]
        _take_steps(c, some, params_of([task.plan for task in some], x.device), vocabulary, x.shape[1])
        yield members, c


def _found(x: Tensor, tasks: Sequence[Task], maxima: Tensor) -> Iterator[tuple[list[int], Candidates]]:
    plans = [task.plan for task in tasks]
    params = params_of(plans, x.device)
    if tasks[0].kind == "top_k":
        yield list(range(len(tasks))), candidates.most_probable(x, plans, params, maxima)
    elif tasks[0].kind in ("near", "far"):
        yield from candidates.possible(x, plans, params, [task.floor for task in tasks], maxima)
    else:
        yield from candidates.everything_of(x, range(len(tasks)), plans)


def _take_steps(
    c: Candidates, tasks: Sequence[Task], params: Params, vocabulary: Vocabulary, width: int
) -> None:
    device = c.p.device
    used = frozenset[Step]().union(*(task.plan.steps for task in tasks))
    for name, step in TRUNCATIONS:
        if name in used:
            step(c, params, _active(name, tasks, device))
    if "mirostat" in used:
        mirostat(c, _targets(tasks, device), _active("mirostat", tasks, device))
    if "dynamic" in used:
        dynamic(c, params, _active("dynamic", tasks, device))
    if "last" in used:
        last(c, params, _active("last", tasks, device))
    if "xtc" in used:
        xtc(c, params, _spared(c, tasks, vocabulary, width))
    if "skew" in used:
        c.order()


def _pick_candidates(c: Candidates, tasks: Sequence[Task], wanted: int) -> Picked:
    numbers = numbers_of(tasks, c.p.device)
    descending = tasks[0].kind == "top_k"  # found in this order on every device
    if not any("skew" in task.plan.steps for task in tasks):
        return pick(c, numbers, wanted, descending)
    powers = params_of([task.plan for task in tasks], c.p.device)["skew_power"]
    return pick(c, numbers**powers, wanted, descending or powers != 1.0)


def numbers_of(tasks: Sequence[Task], device: torch.device) -> Tensor:
    """The uniform numbers (rows, 1) of some rows."""
    drawn = [[task.row.state.uniform(task.row.position)] for task in tasks]
    return torch.tensor(drawn, dtype=torch.float64).to(device, non_blocking=True)


def _active(name: Step, tasks: Sequence[Task], device: torch.device) -> Tensor | None:
    """Which rows use a step (rows, 1); None if all do."""
    uses = [name in task.plan.steps for task in tasks]
    return None if all(uses) else torch.tensor(uses).unsqueeze(1).to(device, non_blocking=True)


def _targets(tasks: Sequence[Task], device: torch.device) -> Tensor:
    targets = [task.row.state.target(task.row.position, task.plan.numbers.tau, device) for task in tasks]
    return torch.stack(targets).unsqueeze(1)


def _spared(c: Candidates, tasks: Sequence[Task], vocabulary: Vocabulary, width: int) -> Tensor | None:
    """Which candidates XTC leaves alone (rows, k); None if that is none."""
    sets = [
        vocabulary.unexcluded if task.plan.xtc_ignored is None else task.plan.xtc_ignored
        for task in tasks
        if "xtc" in task.plan.steps
    ]
    if not any(sets):
        return None
    if all(one is sets[0] or one == sets[0] for one in sets):
        mask = vocabulary.mask(sets[0], width, c.p.device)
        return mask.unsqueeze(0) if c.ids is None else mask[c.ids]
    own = iter(sets)
    of_rows = [next(own) if "xtc" in task.plan.steps else frozenset[int]() for task in tasks]
    masks = torch.stack([vocabulary.mask(one, width, c.p.device) for one in of_rows])
    return masks if c.ids is None else masks.gather(1, c.ids)


def move_targets(tasks: Sequence[Task], p: Tensor) -> None:
    """Let the probabilities (rows,) of picked tokens move mirostat's targets, in the rows that use it."""
    users = [place for place, task in enumerate(tasks) if task.plan.mirostat]
    if not users:
        return
    some = [tasks[place] for place in users]
    params = params_of([task.plan for task in some], p.device)
    if len(some) < len(tasks):
        p = p[torch.tensor(users).to(p.device, non_blocking=True)]
    targets = moved(_targets(some, p.device), params["tau"], params["eta"], p.unsqueeze(1)).squeeze(1)
    for place, task in enumerate(some):
        task.row.state.set_target(task.row.position, targets, place)


def failures(top: Tensor, tokens: Tensor) -> Tensor:
    """Tokens, negative where the largest logit of a row (rows,) says that there is nothing to choose."""
    if top.device.type == "cpu" and math.isfinite(sum(top.tolist())):
        return tokens
    tokens = torch.where(top == -torch.inf, NOTHING_ALLOWED, tokens)
    tokens = torch.where(top == torch.inf, INFINITE, tokens)
    return torch.where(top.isnan(), NOT_A_NUMBER, tokens)


def joined(parts: Sequence[tuple[Sequence[int], Picked]], device: torch.device) -> Picked:
    """Several groups' picks as one; each comes with the numbers of its rows."""
    back = torch.tensor([member for members, _ in parts for member in members]).argsort()
    back = back.to(device, non_blocking=True)
    whole = Picked(
        torch.cat([part.tokens for _, part in parts])[back], torch.cat([part.p for _, part in parts])[back]
    )
    tops = [(part.top_tokens, part.top_p) for _, part in parts]
    if all(tokens is not None for tokens, _ in tops):
        whole.top_tokens = torch.cat([tokens for tokens, _ in tops if tokens is not None])[back]
        whole.top_p = torch.cat([p for _, p in tops if p is not None])[back]
    return whole
