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

from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED
from . import candidates
from .candidates import STEPS_NEEDING_SORT, BatchParams, Candidates, batch_params
from .deterministic_topk import block_maxima
from .draw import GroupOutput, draw_from_candidates, draw_from_full_vocab, greedy_output
from .logits_processors import LogitsEdits
from .mirostat import mirostat, updated_mus
from .params import CompiledSettings, StepName
from .request import SamplingRequest
from .temperature import dynamic_temperature, final_temperature
from .truncation import TRUNCATIONS
from .vocabulary import SamplerVocabulary
from .xtc import xtc

SMALL_VOCAB = 512  # a vocabulary up to here is worked on whole

SearchKind = Literal["greedy", "unfiltered", "top_k", "floor_below_max", "floor_of_total", "full_vocab"]
GroupKey = tuple[SearchKind, bool, bool, bool]


class SamplingTask(NamedTuple):
    """A row with what its settings amount to. `place` is its number in the batch.

    Tasks with the same `company`, which begins with the kind, are worked on together.
    """

    batch_index: int
    request: SamplingRequest
    compiled: CompiledSettings
    edits: LogitsEdits
    log_prob_floor: float
    group_key: GroupKey

    @property
    def search_kind(self) -> SearchKind:
        """How candidates are found."""
        return self.group_key[0]


def make_task(
    batch_index: int,
    request: SamplingRequest,
    compiled: CompiledSettings,
    edits: LogitsEdits,
    width: int,
    device: torch.device,
) -> SamplingTask:
    """Decide how a row's candidates are found; `width` counts the tokens."""
    mu = None
    can_sync = device.type == "cpu"
    if can_sync and "mirostat" in compiled.steps:
        mu = float(request.state.mu_at(request.position, compiled.params.tau, device))
    search = _search_for if mu is None else _search_for.__wrapped__  # no two targets are alike
    floor, group_key = search(compiled, width, can_sync, mu, bool(edits))
    return SamplingTask(batch_index, request, compiled, edits, floor, group_key)


@lru_cache(maxsize=1024)
def _search_for(
    compiled: CompiledSettings, width: int, can_sync: bool, mu: float | None, edited: bool
) -> tuple[float, GroupKey]:
    """A row's floor and company; `may_ask` if the device tells without a stall what lies above a floor."""
    floor = candidates.log_prob_floor(compiled, width, mu) if can_sync else -math.inf
    kind: SearchKind = "full_vocab"
    if compiled.greedy:
        kind = "greedy"
    elif 0 < compiled.top_k < width:
        kind = "top_k"
    elif not compiled.steps:
        kind = "unfiltered"
    elif floor > -math.inf:
        kind = "floor_of_total" if candidates.floor_needs_total(compiled) else "floor_below_max"
    # Sorting the vocabulary is so slow that no row should have to wait for another's.
    needs_sort = (
        kind == "full_vocab" and bool(compiled.steps & STEPS_NEEDING_SORT),
        kind == "full_vocab" and "typical" in compiled.steps,
    )
    return floor, (kind, edited, *needs_sort)


def sample_group(
    x: Tensor, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, num_top: int
) -> GroupOutput:
    """Pick a token for every row of logits (rows, vocab) that are not changed any more; all of one kind.

    Rows without a usable logit get a negative token. Mirostat's targets move on.
    """
    if tasks[0].search_kind == "greedy":
        top, output = greedy_output(x, num_top)
        output.tokens = mark_failures(top, output.tokens)
        update_mus(tasks, output.probs)
        return output
    maxima = block_maxima(x)
    top = maxima.amax(-1, keepdim=True)
    if tasks[0].search_kind == "unfiltered" and x.shape[1] > SMALL_VOCAB:
        params = batch_params([task.compiled for task in tasks], x.device)
        output = draw_from_full_vocab(x, top, params, uniforms_for(tasks, x.device), num_top)
    else:
        parts = [
            (members, _draw(c, [tasks[member] for member in members], num_top))
            for members, c in final_candidates(x, tasks, vocabulary, maxima)
        ]
        output = parts[0][1] if len(parts) == 1 else join_groups(parts, x.device)
    output.tokens = mark_failures(top.squeeze(1), output.tokens)
    update_mus(tasks, output.probs)
    return output


def final_candidates(
    x: Tensor, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    """The candidates of rows after every step, some rows at a time: their numbers among the tasks first."""
    for members, c in _find_candidates(x, tasks, maxima):
        member_tasks = [tasks[member] for member in members]
        _apply_steps(
            c,
            member_tasks,
            batch_params([task.compiled for task in member_tasks], x.device),
            vocabulary,
            x.shape[1],
        )
        yield members, c


def _find_candidates(
    x: Tensor, tasks: Sequence[SamplingTask], maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    compiled_rows = [task.compiled for task in tasks]
    params = batch_params(compiled_rows, x.device)
    if tasks[0].search_kind == "top_k":
        yield list(range(len(tasks))), candidates.top_k_candidates(x, compiled_rows, params, maxima)
    elif tasks[0].search_kind in ("floor_below_max", "floor_of_total"):
        yield from candidates.candidates_above_floor(
            x, compiled_rows, params, [task.log_prob_floor for task in tasks], maxima
        )
    else:
        yield from candidates.all_candidates_in_chunks(x, range(len(tasks)), compiled_rows)


def _apply_steps(
    c: Candidates,
    tasks: Sequence[SamplingTask],
    params: BatchParams,
    vocabulary: SamplerVocabulary,
    width: int,
) -> None:
    device = c.p.device
    used = frozenset[StepName]().union(*(task.compiled.steps for task in tasks))
    for name, step in TRUNCATIONS:
        if name in used:
            step(c, params, _rows_using(name, tasks, device))
    if "mirostat" in used:
        mirostat(c, _mus(tasks, device), _rows_using("mirostat", tasks, device))
    if "dynamic_temperature" in used:
        dynamic_temperature(c, params, _rows_using("dynamic_temperature", tasks, device))
    if "final_temperature" in used:
        final_temperature(c, params, _rows_using("final_temperature", tasks, device))
    if "xtc" in used:
        xtc(c, params, _xtc_exempt_mask(c, tasks, vocabulary, width))
    if "skew" in used:
        c.sort_descending()


def _draw(c: Candidates, tasks: Sequence[SamplingTask], num_top: int) -> GroupOutput:
    uniforms = uniforms_for(tasks, c.p.device)
    descending = tasks[0].search_kind == "top_k"  # found in this order on every device
    if not any("skew" in task.compiled.steps for task in tasks):
        return draw_from_candidates(c, uniforms, num_top, descending)
    powers = batch_params([task.compiled for task in tasks], c.p.device)["skew_power"]
    return draw_from_candidates(c, uniforms**powers, num_top, descending or powers != 1.0)


def uniforms_for(tasks: Sequence[SamplingTask], device: torch.device) -> Tensor:
    """The uniform numbers (rows, 1) of some rows."""
    uniforms = [[task.request.state.uniform(task.request.position)] for task in tasks]
    return torch.tensor(uniforms, dtype=torch.float64).to(device, non_blocking=True)


def _rows_using(name: StepName, tasks: Sequence[SamplingTask], device: torch.device) -> Tensor | None:
    """Which rows use a step (rows, 1); None if all do."""
    uses = [name in task.compiled.steps for task in tasks]
    return None if all(uses) else torch.tensor(uses).unsqueeze(1).to(device, non_blocking=True)


def _mus(tasks: Sequence[SamplingTask], device: torch.device) -> Tensor:
    mus = [
        task.request.state.mu_at(task.request.position, task.compiled.params.tau, device) for task in tasks
    ]
    return torch.stack(mus).unsqueeze(1)


def _xtc_exempt_mask(
    c: Candidates, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, width: int
) -> Tensor | None:
    """Which candidates XTC leaves alone (rows, k); None if that is none."""
    sets = [
        vocabulary.xtc_exempt_ids if task.compiled.xtc_exempt_ids is None else task.compiled.xtc_exempt_ids
        for task in tasks
        if "xtc" in task.compiled.steps
    ]
    if not any(sets):
        return None
    if all(one is sets[0] or one == sets[0] for one in sets):
        mask = vocabulary.mask(sets[0], width, c.p.device)
        return mask.unsqueeze(0) if c.ids is None else mask[c.ids]
    own = iter(sets)
    of_rows = [next(own) if "xtc" in task.compiled.steps else frozenset[int]() for task in tasks]
    masks = torch.stack([vocabulary.mask(one, width, c.p.device) for one in of_rows])
    return masks if c.ids is None else masks.gather(1, c.ids)


def update_mus(tasks: Sequence[SamplingTask], p: Tensor) -> None:
    """Let the probabilities (rows,) of picked tokens move mirostat's targets, in the rows that use it."""
    mirostat_rows = [index for index, task in enumerate(tasks) if task.compiled.mirostat]
    if not mirostat_rows:
        return
    mirostat_tasks = [tasks[index] for index in mirostat_rows]
    params = batch_params([task.compiled for task in mirostat_tasks], p.device)
    if len(mirostat_tasks) < len(tasks):
        p = p[torch.tensor(mirostat_rows).to(p.device, non_blocking=True)]
    mus = updated_mus(_mus(mirostat_tasks, p.device), params["tau"], params["eta"], p.unsqueeze(1)).squeeze(1)
    for index, task in enumerate(mirostat_tasks):
        task.request.state.record_mu(task.request.position, mus, index)


def mark_failures(top: Tensor, tokens: Tensor) -> Tensor:
    """Tokens, negative where the largest logit of a row (rows,) says that there is nothing to choose."""
    if top.device.type == "cpu" and math.isfinite(sum(top.tolist())):
        return tokens
    tokens = torch.where(top == -torch.inf, NO_TOKEN_ALLOWED, tokens)
    tokens = torch.where(top == torch.inf, INFINITE_LOGITS, tokens)
    return torch.where(top.isnan(), NAN_LOGITS, tokens)


def join_groups(parts: Sequence[tuple[Sequence[int], GroupOutput]], device: torch.device) -> GroupOutput:
    """Several groups' picks as one; each comes with the numbers of its rows."""
    batch_order = torch.tensor([member for members, _ in parts for member in members]).argsort()
    batch_order = batch_order.to(device, non_blocking=True)
    output = GroupOutput(
        torch.cat([part.tokens for _, part in parts])[batch_order],
        torch.cat([part.probs for _, part in parts])[batch_order],
    )
    tops = [(part.top_tokens, part.top_probs) for _, part in parts]
    if all(tokens is not None for tokens, _ in tops):
        output.top_tokens = torch.cat([tokens for tokens, _ in tops if tokens is not None])[batch_order]
        output.top_probs = torch.cat([p for _, p in tops if p is not None])[batch_order]
    return output
