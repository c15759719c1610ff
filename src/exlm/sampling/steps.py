"""The steps of the chain in torch, one function each, under the names of `exlm.sampler_chain`.

A step works on all rows of a `RowGroup`, and changes those that are `active` (rows, 1), or all. A step on logits
changes them in place. A step on candidates leaves at least one token in every row. A step on the draw changes
the uniform numbers. A stateful step has a second function, which gives its state after the drawn tokens. Top-k
comes before all these, when candidates are found. Thresholds are inclusive, with a tolerance for the rounding of
float32 logits (THRESHOLD_TOLERANCE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling_layout import BLOCKED_LOGIT, GREEDY_BELOW_TEMPERATURE, TFS_MIN_PROB, THRESHOLD_TOLERANCE
from ..sampler_chain import STATEFUL_STEPS
from .candidates import STEPS_NEEDING_SORT, Candidates, batch_params, is_floor_of_total, log_prob_floor
from .logits_processors import NO_EDITS, LogitsEdits
from .request import SamplingRequest
from .settings import CompiledSettings
from .vocabulary import SamplerVocabulary

SearchKind = Literal["greedy", "unfiltered", "top_k", "floor_of_max", "floor_of_total", "full_vocab"]
"""How a row's candidates are found.

`greedy`: the largest logit alone. `unfiltered`: a draw from all tokens, because no step changes probabilities.
`top_k`: the k largest logits. `floor_of_max` and `floor_of_total`: the tokens above a floor, which is a fraction
of the largest probability or of the sum of all. `full_vocab`: all tokens go through the steps.
"""


class GroupKey(NamedTuple):
    """What rows have in common that go through the steps together.

    Sorting the vocabulary is slow: rows that need no sorting, by probability or by surprisal, get another group.
    """

    search: SearchKind
    edits_logits: bool
    sorts_vocab: bool
    sorts_by_surprisal: bool


class BatchRow(NamedTuple):
    """A row of the batch, with what its settings ask for at its position.

    Tokens whose probability has a logarithm below `log_prob_floor` need not be looked at.
    """

    batch_index: int
    request: SamplingRequest
    compiled: CompiledSettings
    edits: LogitsEdits
    position: int
    log_prob_floor: float
    group_key: GroupKey


def make_row(
    batch_index: int,
    request: SamplingRequest,
    compiled: CompiledSettings,
    edits: LogitsEdits,
    width: int,
    device: torch.device,
) -> BatchRow:
    """Decide how a row's candidates are found; `width` counts the tokens."""
    mu, position = None, request.position
    can_sync = device.type == "cpu"
    if can_sync and "mirostat" in compiled.probs_steps:
        initial = STATEFUL_STEPS["mirostat"](compiled.params)
        mu = float(request.state.step_state("mirostat").at(position, initial, device))
    search = _search_for if mu is None else _search_for.__wrapped__  # caching would not help: targets differ
    edits_logits = edits is not NO_EDITS or bool(compiled.logits_steps)
    return BatchRow(
        batch_index, request, compiled, edits, position, *search(compiled, width, can_sync, mu, edits_logits)
    )


@lru_cache(maxsize=1024)
def _search_for(
    compiled: CompiledSettings, width: int, can_sync: bool, mu: float | None, edited: bool
) -> tuple[float, GroupKey]:
    """A row's floor and group key; `can_sync` if the host may wait for what lies above a floor."""
    floor = log_prob_floor(compiled, width, mu) if can_sync else -math.inf
    kind: SearchKind = "full_vocab"
    if compiled.greedy:
        kind = "greedy"
    elif 0 < compiled.top_k < width:
        kind = "top_k"
    elif not compiled.probs_steps:
        kind = "unfiltered"
    elif floor > -math.inf:
        kind = "floor_of_total" if is_floor_of_total(compiled) else "floor_of_max"
    is_full = kind == "full_vocab"
    sorts_vocab = is_full and bool(compiled.probs_steps & STEPS_NEEDING_SORT)
    return floor, GroupKey(kind, edited, sorts_vocab, is_full and "typical" in compiled.probs_steps)


class RowGroup:
    """Rows that go through the steps together, and what the steps read of them.

    `params` are float64 columns (rows, 1), or (1, 1) where the rows agree. `active` has every step that changes
    a row, with the rows that take it (rows, 1); None if all do. `stateful_steps` are those whose state a row
    keeps. `width` counts the tokens.
    """

    def __init__(
        self, rows: Sequence[BatchRow], vocabulary: SamplerVocabulary, width: int, device: torch.device
    ) -> None:
        self.rows, self.vocabulary, self.width, self.device = rows, vocabulary, width, device
        self.search, self.edits_logits = rows[0].group_key[:2]
        self.batch_indices = [row.batch_index for row in rows]
        self.compiled = [row.compiled for row in rows]
        self.batch_params = batch_params(self.compiled, device)
        self.params = self.batch_params.columns
        different = set(self.compiled)
        taken = [compiled.probs_steps.union(compiled.logits_steps) for compiled in different]
        self.active: dict[str, Tensor | None] = dict.fromkeys(frozenset.intersection(*taken))
        for step in frozenset.union(*taken).difference(self.active):
            takes_step = [[step in compiled.probs_steps or step in compiled.logits_steps] for compiled in self.compiled]
            self.active[step] = torch.tensor(takes_step).to(device, non_blocking=True)
        self.stateful_steps = {step for compiled in different for step in compiled.stateful_steps}

    def select(self, members: Sequence[int]) -> RowGroup:
        """Some of the rows."""
        return RowGroup([self.rows[i] for i in members], self.vocabulary, self.width, self.device)

    def uniforms(self) -> Tensor:
        """Each row's uniform number (rows, 1) for the token that is to be sampled."""
        uniforms = [[row.request.state.uniform(row.position)] for row in self.rows]
        return torch.tensor(uniforms, dtype=torch.float64).to(self.device, non_blocking=True)

    def state(self, step: str) -> Tensor:
        """Each row's state of a step (rows, 1), for the token that is to be sampled."""
        initial = STATEFUL_STEPS[step]
        states = [
            row.request.state.step_state(step).at(row.position, initial(row.compiled.params), self.device)
            for row in self.rows
        ]
        return torch.stack(states).unsqueeze(1)

    def record_state(self, step: str, values: Tensor) -> None:
        """Remember the states (rows, 1) that the drawn tokens led to, in the rows that keep one."""
        flat = values.squeeze(1)
        for index, row in enumerate(self.rows):
            if step in row.compiled.stateful_steps:
                row.request.state.step_state(step).record(row.position, flat, index)


def top_n_sigma(x: Tensor, group: RowGroup, active: Tensor | None) -> None:
    """Exclude logits more than n standard deviations below the row's largest one.

    The deviation is that of all tokens that nothing excluded or blocked before. A row with a NaN or an
    infinite logit keeps it, so that it fails as such.
    """
    counted = x > BLOCKED_LOGIT / 2
    count = counted.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(counted, x, 0.0).double().sum(-1, keepdim=True) / count
    variance = torch.where(counted, x - mean, 0.0).square_().sum(-1, keepdim=True) / count
    limit = group.params["top_n_sigma"] * variance.sqrt() * (1.0 + THRESHOLD_TOLERANCE)
    excluded = x.amax(-1, keepdim=True).double() - x > limit
    x.masked_fill_(excluded if active is None else excluded & active, -torch.inf)


def top_p(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """The smallest set of most probable tokens that reaches p together: the token that reaches it stays."""
    c.sort_descending()
    before = c.p.cumsum(-1) - c.p
    c.keep_and_renormalize(
        before < (group.params["top_p"] - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE), active
    )


def top_a(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Tokens with at least a times the square of the largest probability."""
    top = c.p.amax(-1, keepdim=True)
    c.keep_and_renormalize(
        c.p >= torch.minimum(group.params["top_a"] * top * top * (1.0 - THRESHOLD_TOLERANCE), top), active
    )


def min_p(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Tokens with at least a given part of the largest probability."""
    c.keep_and_renormalize(
        c.p >= group.params["min_p"] * c.p.amax(-1, keepdim=True) * (1.0 - THRESHOLD_TOLERANCE), active
    )


def tfs(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Tail-free sampling: tokens before the tail, which begins where the curvature sums to more than tfs of its total.

    Curvature is the absolute second difference of the sorted probabilities.

    Tokens below 1e-8 go in any case; with fewer than three left, or on a straight line, there is no tail.
    """
    c.sort_descending()
    p = torch.where(c.p >= TFS_MIN_PROB, c.p, 0.0)
    columns = torch.arange(p.shape[1], device=p.device)
    count = (p > 0).sum(-1, keepdim=True)
    has_curvature = columns[:-2] < count - 2
    curvature = torch.where(has_curvature, (p[:, :-2] - 2.0 * p[:, 1:-1] + p[:, 2:]).abs(), 0.0)
    total = curvature.sum(-1, keepdim=True)
    spent = has_curvature & (curvature.cumsum(-1) <= (group.params["tfs"] + THRESHOLD_TOLERANCE) * total)
    tail_start = torch.where(total > TFS_MIN_PROB * THRESHOLD_TOLERANCE, spent.sum(-1, keepdim=True) + 1, count)
    c.keep_and_renormalize((p > 0) & (columns < tail_start), active)


def typical(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Locally typical sampling: the tokens whose surprisal is nearest to the entropy, up to the given mass."""
    surprisal = -torch.where(c.p > 0, c.p, 1.0).log()
    entropy = (c.p * surprisal).sum(-1, keepdim=True)
    distance = torch.where(c.p > 0, (surprisal - entropy).abs(), torch.inf)
    c.keep_and_renormalize(_mask_until_mass(distance, c.p, group.params["typical"]), active)


def _mask_until_mass(keys: Tensor, p: Tensor, mass: Tensor) -> Tensor:
    """Which columns, taken in ascending order of their keys, it takes to reach a mass."""
    _, columns = torch.sort(keys, dim=-1, stable=True)
    sorted_p = p.gather(1, columns)
    kept = sorted_p.cumsum(-1) - sorted_p < (mass - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE)
    return torch.zeros_like(kept).scatter_(1, columns, kept)


def mirostat(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Mirostat 2: tokens whose surprisal in bits is at most each row's target; at least the most probable."""
    min_prob = torch.exp2(-group.state("mirostat")) * (1.0 - THRESHOLD_TOLERANCE)
    c.keep_and_renormalize(c.p >= torch.minimum(min_prob, c.p.amax(-1, keepdim=True)), active)


def update_mirostat(c: Candidates | None, tokens: Tensor, p: Tensor, group: RowGroup) -> Tensor:
    """The targets after tokens of these probabilities were drawn."""
    return group.state("mirostat") + group.params["mirostat_eta"] * (group.params["mirostat_tau"] + p.log2())


def dynamic_temperature(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """A temperature between min_temp and max_temp, by how near the candidates are to equally probable.

    Below 0.01 it leaves only the most probable token, as everywhere.
    """
    entropy = -torch.special.xlogy(c.p, c.p).sum(-1, keepdim=True)
    count = (c.p > 0).sum(-1, keepdim=True)
    max_entropy = torch.where(count > 1, count.double().log(), 1.0)
    relative_entropy = (entropy / max_entropy).clamp(0.0, 1.0) ** group.params["temp_exponent"]
    temperature = group.params["min_temp"] + (group.params["max_temp"] - group.params["min_temp"]) * relative_entropy
    _apply_temperature(c, temperature, active)


def final_temperature(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Probabilities to the power of one over the temperature."""
    _apply_temperature(c, group.params["final_temperature"].expand(len(c.p), 1), active)


def _apply_temperature(c: Candidates, temperature: Tensor, active: Tensor | None) -> None:
    if active is not None:
        temperature = torch.where(active, temperature, 1.0)
    top, top_column = c.p.max(-1, keepdim=True)
    power = (c.p / top).log() / temperature.clamp_min(GREEDY_BELOW_TEMPERATURE)
    is_top = torch.arange(c.p.shape[1], device=c.p.device) == top_column
    weights = torch.where((temperature >= GREEDY_BELOW_TEMPERATURE) | is_top, power, -torch.inf).exp()
    c.p = weights / weights.sum(-1, keepdim=True)


def xtc(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Exclude, with a given probability, all tokens above the threshold but the least probable of them.

    Nothing is drawn here: the result is the mean of both outcomes, weighted by that probability. Exempt tokens
    are never excluded. Rows that do not use it have a probability of 0, which changes nothing.
    """
    above_threshold = (c.p >= group.params["xtc_threshold"] * (1.0 - THRESHOLD_TOLERANCE)) & (c.p > 0)
    exempt = _xtc_exempt_mask(c, group)
    if exempt is not None:
        above_threshold &= ~exempt
    lowest_prob = torch.where(above_threshold, c.p, torch.inf).amin(-1, keepdim=True)
    columns = torch.arange(c.p.shape[1], device=c.p.device)
    # Of equally probable tokens the last one stays, which in descending order is the last of all.
    kept_column = torch.where(above_threshold & (c.p == lowest_prob), columns, -1).amax(-1, keepdim=True)
    excluded = above_threshold & (columns != kept_column)
    mass = torch.where(excluded, c.p, 0.0).sum(-1, keepdim=True)
    probability = group.params["xtc_probability"]
    scale_up = 1.0 + probability * mass / (1.0 - mass).clamp_min(1e-300)
    c.p = c.p * torch.where(excluded, 1.0 - probability, scale_up)


def _xtc_exempt_mask(c: Candidates, group: RowGroup) -> Tensor | None:
    """Which candidates XTC never excludes (rows, k); None if that is none."""
    vocabulary, width, device = group.vocabulary, group.width, group.device
    sets = [vocabulary.xtc_exempt_ids_of(each) if "xtc" in each.probs_steps else None for each in group.compiled]
    used = [ids for ids in sets if ids is not None]
    if not any(used):
        return None
    if all(ids is used[0] or ids == used[0] for ids in used):
        mask = vocabulary.mask(used[0], width, device)
        return mask.unsqueeze(0) if c.ids is None else mask[c.ids]
    masks = torch.stack([vocabulary.mask(ids or frozenset(), width, device) for ids in sets])
    return masks if c.ids is None else masks.gather(1, c.ids)


ADAPTIVE_WIDTH = 0.3  # of probability: the unit of the distance to the target
ADAPTIVE_SHARPNESS = 10.0  # new logits fall with the square of a small distance, linearly in a large one


def adaptive_p(c: Candidates, group: RowGroup, active: Tensor | None) -> None:
    """Prefer tokens whose probability is near a target, which compensates for the mean of the tokens before.

    The state is that mean, exponentially decaying, of the drawn tokens' probabilities before this step. The
    candidates keep their order.
    """
    target = (2.0 * group.params["adaptive_target"] - group.state("adaptive_p")).clamp(0.0, 1.0)
    distance = (c.p - target).abs() / ADAPTIVE_WIDTH
    new_logits = -ADAPTIVE_SHARPNESS * distance.square() / (1.0 + distance)
    weights = torch.where(c.p > 0, new_logits.exp(), 0.0)
    reshaped = weights / weights.sum(-1, keepdim=True)
    c.original = c.p, c.ids
    c.p = reshaped if active is None else torch.where(active, reshaped, c.p)


def update_adaptive_p(c: Candidates | None, tokens: Tensor, p: Tensor, group: RowGroup) -> Tensor:
    """The means after these tokens; a greedy row's token is a certainty."""
    original = p if c is None else c.original_probs(tokens)
    return (
        group.params["adaptive_decay"] * group.state("adaptive_p") + (1.0 - group.params["adaptive_decay"]) * original
    )


def skew(c: Candidates, uniforms: Tensor, group: RowGroup) -> Tensor:
    """Uniform numbers (rows, 1) bent towards 0 or 1; such rows are drawn from in descending order."""
    c.sort_descending()
    return uniforms ** group.params["skew_power"]


LogitsStep = Callable[[Tensor, RowGroup, Tensor | None], None]
CandidatesStep = Callable[[Candidates, RowGroup, Tensor | None], None]
DrawStep = Callable[[Candidates, Tensor, RowGroup], Tensor]
StateUpdate = Callable[[Candidates | None, Tensor, Tensor, RowGroup], Tensor]

LOGITS_STEPS: Mapping[str, LogitsStep] = MappingProxyType({"top_n_sigma": top_n_sigma})
CANDIDATES_STEPS: Mapping[str, CandidatesStep] = MappingProxyType(
    {
        "top_p": top_p,
        "top_a": top_a,
        "min_p": min_p,
        "tfs": tfs,
        "typical": typical,
        "mirostat": mirostat,
        "dynamic_temperature": dynamic_temperature,
        "final_temperature": final_temperature,
        "xtc": xtc,
        "adaptive_p": adaptive_p,
    }
)
DRAW_STEPS: Mapping[str, DrawStep] = MappingProxyType({"skew": skew})
STATE_UPDATES: Mapping[str, StateUpdate] = MappingProxyType(
    {"mirostat": update_mirostat, "adaptive_p": update_adaptive_p}
)
"""From the candidates (None for greedy rows), the drawn tokens (rows, 1) and their final probabilities (rows,
1) to the new states (rows, 1)."""
