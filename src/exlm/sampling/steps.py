"""The steps of the chain in torch, one function each, under the names of `exlm.sampler_chain`.

A step on logits changes them in place. A step on candidates takes them and the rows as `StepRows`, and leaves
at least one token in every row. A step on the draw changes the uniform numbers. A stateful step has a second
function, which gives its state after the drawn tokens. Top-k comes before all these, when candidates are
found. Thresholds are inclusive, and met by whatever float32 logits cannot tell from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling_layout import BLOCKED_LOGIT, GREEDY_BELOW_TEMPERATURE, TFS_MIN_PROB, THRESHOLD_TOLERANCE
from ..sampler_chain import STATEFUL_STEPS
from .candidates import BatchParams, Candidates
from .request import SamplingRequest
from .settings import CompiledSettings
from .vocabulary import SamplerVocabulary


class RowGroup(NamedTuple):
    """Rows that go through the steps together, and what their steps read; `width` counts the tokens."""

    requests: Sequence[SamplingRequest]
    compiled: Sequence[CompiledSettings]
    params: BatchParams
    vocabulary: SamplerVocabulary
    width: int
    device: torch.device


class StepRows:
    """The rows of a group as one step sees them: the parameters, which rows use the step, and their states.

    `params` are float64 columns (rows, 1), or (1, 1) where the rows agree. `active` says which rows use the
    step (rows, 1); None if all do.
    """

    def __init__(self, step: str, group: RowGroup) -> None:
        self.step = step
        self.params = group.params.columns
        self.device = group.device
        self._group = group
        uses = [step in compiled.steps or step in compiled.logits_steps for compiled in group.compiled]
        self.active = None if all(uses) else torch.tensor(uses).unsqueeze(1).to(self.device, non_blocking=True)

    @cached_property
    def state(self) -> Tensor:
        """Each row's state of the step (rows, 1), for the token that is to be sampled."""
        initial, group = STATEFUL_STEPS[self.step], self._group
        states = [
            request.state.step_state(self.step).at(request.position, initial(compiled.params), self.device)
            for request, compiled in zip(group.requests, group.compiled, strict=True)
        ]
        return torch.stack(states).unsqueeze(1)

    def record_state(self, values: Tensor) -> None:
        """Remember the states (rows, 1) that the drawn tokens led to, in the rows that use the step."""
        flat, group = values.squeeze(1), self._group
        for index, (request, compiled) in enumerate(zip(group.requests, group.compiled, strict=True)):
            if self.step in compiled.stateful_steps:
                request.state.step_state(self.step).record(request.position, flat, index)

    def xtc_exempt_mask(self, c: Candidates) -> Tensor | None:
        """Which candidates XTC never excludes (rows, k); None if that is none."""
        _, compiled_rows, _, vocabulary, width, device = self._group
        sets = [
            vocabulary.xtc_exempt_ids_of(compiled) if self.step in compiled.steps else None
            for compiled in compiled_rows
        ]
        used = [ids for ids in sets if ids is not None]
        if not any(used):
            return None
        if all(ids is used[0] or ids == used[0] for ids in used):
            mask = vocabulary.mask(used[0], width, device)
            return mask.unsqueeze(0) if c.ids is None else mask[c.ids]
        masks = torch.stack([vocabulary.mask(ids or frozenset(), width, device) for ids in sets])
        return masks if c.ids is None else masks.gather(1, c.ids)


def top_n_sigma(x: Tensor, rows: StepRows) -> None:
    """Exclude logits more than n standard deviations below the row's largest one.

    The deviation is that of all tokens that nothing excluded or blocked before. A row with a NaN or an
    infinite logit keeps it, so that it fails as such.
    """
    counted = x > BLOCKED_LOGIT / 2
    count = counted.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(counted, x, 0.0).double().sum(-1, keepdim=True) / count
    variance = torch.where(counted, x - mean, 0.0).square_().sum(-1, keepdim=True) / count
    limit = rows.params["top_n_sigma"] * variance.sqrt() * (1.0 + THRESHOLD_TOLERANCE)
    excluded = x.amax(-1, keepdim=True).double() - x > limit
    x.masked_fill_(excluded if rows.active is None else excluded & rows.active, -torch.inf)


def top_p(c: Candidates, rows: StepRows) -> None:
    """The smallest set of most probable tokens that reaches p together: the token that reaches it stays."""
    c.sort_descending()
    before = c.p.cumsum(-1) - c.p
    c.keep_and_renormalize(
        before < (rows.params["top_p"] - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE), rows.active
    )


def top_a(c: Candidates, rows: StepRows) -> None:
    """Tokens with at least a times the square of the largest probability."""
    top = c.p.amax(-1, keepdim=True)
    c.keep_and_renormalize(
        c.p >= torch.minimum(rows.params["top_a"] * top * top * (1.0 - THRESHOLD_TOLERANCE), top), rows.active
    )


def min_p(c: Candidates, rows: StepRows) -> None:
    """Tokens with at least a given part of the largest probability."""
    c.keep_and_renormalize(
        c.p >= rows.params["min_p"] * c.p.amax(-1, keepdim=True) * (1.0 - THRESHOLD_TOLERANCE), rows.active
    )


def tfs(c: Candidates, rows: StepRows) -> None:
    """Tokens before the tail, which begins where the curve of sorted probabilities has spent its curvature.

    Tokens below 1e-8 go in any case; with fewer than three left, or on a straight line, there is no tail.
    """
    c.sort_descending()
    p = torch.where(c.p >= TFS_MIN_PROB, c.p, 0.0)
    columns = torch.arange(p.shape[1], device=p.device)
    count = (p > 0).sum(-1, keepdim=True)
    has_curvature = columns[:-2] < count - 2
    curvature = torch.where(has_curvature, (p[:, :-2] - 2.0 * p[:, 1:-1] + p[:, 2:]).abs(), 0.0)
    total = curvature.sum(-1, keepdim=True)
    spent = has_curvature & (curvature.cumsum(-1) <= (rows.params["tfs"] + THRESHOLD_TOLERANCE) * total)
    tail_start = torch.where(total > TFS_MIN_PROB * THRESHOLD_TOLERANCE, spent.sum(-1, keepdim=True) + 1, count)
    c.keep_and_renormalize((p > 0) & (columns < tail_start), rows.active)


def typical(c: Candidates, rows: StepRows) -> None:
    """Tokens whose surprise is nearest to what is expected, until they reach the given mass together."""
    surprise = -torch.where(c.p > 0, c.p, 1.0).log()
    expected = (c.p * surprise).sum(-1, keepdim=True)
    distance = torch.where(c.p > 0, (surprise - expected).abs(), torch.inf)
    c.keep_and_renormalize(_mask_until_mass(distance, c.p, rows.params["typical"]), rows.active)


def _mask_until_mass(keys: Tensor, p: Tensor, mass: Tensor) -> Tensor:
    """Which columns, taken in ascending order of their keys, it takes to reach a mass."""
    _, columns = torch.sort(keys, dim=-1, stable=True)
    sorted_p = p.gather(1, columns)
    kept = sorted_p.cumsum(-1) - sorted_p < (mass - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE)
    return torch.zeros_like(kept).scatter_(1, columns, kept)


def mirostat(c: Candidates, rows: StepRows) -> None:
    """Tokens no more surprising, in bits, than each row's target; at least the most probable."""
    min_prob = torch.exp2(-rows.state) * (1.0 - THRESHOLD_TOLERANCE)
    c.keep_and_renormalize(c.p >= torch.minimum(min_prob, c.p.amax(-1, keepdim=True)), rows.active)


def update_mirostat(c: Candidates | None, tokens: Tensor, p: Tensor, rows: StepRows) -> Tensor:
    """The targets after tokens of these probabilities were drawn."""
    return rows.state + rows.params["mirostat_eta"] * (rows.params["mirostat_tau"] + p.log2())


def dynamic_temperature(c: Candidates, rows: StepRows) -> None:
    """A temperature between min_temp and max_temp, by how near the candidates are to equally probable.

    Below 0.01 it leaves only the most probable token, as everywhere.
    """
    entropy = -torch.special.xlogy(c.p, c.p).sum(-1, keepdim=True)
    count = (c.p > 0).sum(-1, keepdim=True)
    max_entropy = torch.where(count > 1, count.double().log(), 1.0)
    relative_entropy = (entropy / max_entropy).clamp(0.0, 1.0) ** rows.params["temp_exponent"]
    temperature = rows.params["min_temp"] + (rows.params["max_temp"] - rows.params["min_temp"]) * relative_entropy
    _apply_temperature(c, temperature, rows.active)


def final_temperature(c: Candidates, rows: StepRows) -> None:
    """Probabilities to the power of one over the temperature."""
    _apply_temperature(c, rows.params["final_temperature"].expand(len(c.p), 1), rows.active)


def _apply_temperature(c: Candidates, temperature: Tensor, active: Tensor | None) -> None:
    if active is not None:
        temperature = torch.where(active, temperature, 1.0)
    top, top_column = c.p.max(-1, keepdim=True)
    power = (c.p / top).log() / temperature.clamp_min(GREEDY_BELOW_TEMPERATURE)
    is_top = torch.arange(c.p.shape[1], device=c.p.device) == top_column
    weights = torch.where((temperature >= GREEDY_BELOW_TEMPERATURE) | is_top, power, -torch.inf).exp()
    c.p = weights / weights.sum(-1, keepdim=True)


def xtc(c: Candidates, rows: StepRows) -> None:
    """Scale down all but the least probable token above the threshold; exempt tokens never count.

    Rows that do not use it have a probability of exclusion of 0, which changes nothing.
    """
    above_threshold = (c.p >= rows.params["xtc_threshold"] * (1.0 - THRESHOLD_TOLERANCE)) & (c.p > 0)
    exempt = rows.xtc_exempt_mask(c)
    if exempt is not None:
        above_threshold &= ~exempt
    lowest_prob = torch.where(above_threshold, c.p, torch.inf).amin(-1, keepdim=True)
    columns = torch.arange(c.p.shape[1], device=c.p.device)
    # Of equally probable tokens the last one stays, which in descending order is the last of all.
    kept_column = torch.where(above_threshold & (c.p == lowest_prob), columns, -1).amax(-1, keepdim=True)
    excluded = above_threshold & (columns != kept_column)
    mass = torch.where(excluded, c.p, 0.0).sum(-1, keepdim=True)
    probability = rows.params["xtc_probability"]
    scale_up = 1.0 + probability * mass / (1.0 - mass).clamp_min(1e-300)
    c.p = c.p * torch.where(excluded, 1.0 - probability, scale_up)


ADAPTIVE_WIDTH = 0.3  # of probability: the unit of the distance to the target
ADAPTIVE_SHARPNESS = 10.0  # new logits fall with the square of a small distance, linearly in a large one


def adaptive_p(c: Candidates, rows: StepRows) -> None:
    """Prefer tokens whose probability is near a target, which compensates for the mean of the tokens before.

    The state is that mean, exponentially decaying, of the drawn tokens' probabilities before this step. The
    candidates keep their order.
    """
    target = (2.0 * rows.params["adaptive_target"] - rows.state).clamp(0.0, 1.0)
    distance = (c.p - target).abs() / ADAPTIVE_WIDTH
    new_logits = -ADAPTIVE_SHARPNESS * distance.square() / (1.0 + distance)
    weights = torch.where(c.p > 0, new_logits.exp(), 0.0)
    reshaped = weights / weights.sum(-1, keepdim=True)
    c.original = c.p, c.ids
    c.p = reshaped if rows.active is None else torch.where(rows.active, reshaped, c.p)


def update_adaptive_p(c: Candidates | None, tokens: Tensor, p: Tensor, rows: StepRows) -> Tensor:
    """The means after these tokens; a greedy row's token is a certainty."""
    original = p if c is None else c.original_probs(tokens)
    return rows.params["adaptive_decay"] * rows.state + (1.0 - rows.params["adaptive_decay"]) * original


def skew(c: Candidates, uniforms: Tensor, rows: StepRows) -> Tensor:
    """Uniform numbers (rows, 1) bent towards 0 or 1; such rows are drawn from in descending order."""
    c.sort_descending()
    return uniforms ** rows.params["skew_power"]


LogitsStep = Callable[[Tensor, StepRows], None]
CandidatesStep = Callable[[Candidates, StepRows], None]
DrawStep = Callable[[Candidates, Tensor, StepRows], Tensor]
StateUpdate = Callable[[Candidates | None, Tensor, Tensor, StepRows], Tensor]

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
