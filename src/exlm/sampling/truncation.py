"""The steps that drop improbable tokens: top-p, top-a, min-p, tail-free and locally typical sampling.

Each takes the candidates, the group's parameters and which rows it is for (None: all), and leaves at least
one token in every row. Top-k comes before them, when candidates are gathered. Thresholds are inclusive, and
met by whatever float32 logits cannot tell from them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.sampling_layout import GREEDY_BELOW_TEMPERATURE, TFS_MIN_PROB, THRESHOLD_TOLERANCE
from .candidates import BatchParams, Candidates


def top_p(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """The smallest set of most probable tokens that reaches p together: the token that reaches it stays."""
    c.sort_descending()
    before = c.p.cumsum(-1) - c.p
    c.keep_and_renormalize(
        before < (params["top_p"] - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE), active
    )


def top_a(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """Tokens with at least a times the square of the largest probability."""
    top = c.p.amax(-1, keepdim=True)
    c.keep_and_renormalize(
        c.p >= torch.minimum(params["top_a"] * top * top * (1.0 - THRESHOLD_TOLERANCE), top), active
    )


def min_p(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """Tokens with at least a given part of the largest probability."""
    c.keep_and_renormalize(
        c.p >= params["min_p"] * c.p.amax(-1, keepdim=True) * (1.0 - THRESHOLD_TOLERANCE), active
    )


def tfs(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
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
    spent = has_curvature & (curvature.cumsum(-1) <= (params["tfs"] + THRESHOLD_TOLERANCE) * total)
    tail_start = torch.where(
        total > TFS_MIN_PROB * THRESHOLD_TOLERANCE, spent.sum(-1, keepdim=True) + 1, count
    )
    c.keep_and_renormalize((p > 0) & (columns < tail_start), active)


def typical(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """Tokens whose surprise is nearest to what is expected, until they reach the given mass together."""
    surprise = -torch.where(c.p > 0, c.p, 1.0).log()
    expected = (c.p * surprise).sum(-1, keepdim=True)
    distance = torch.where(c.p > 0, (surprise - expected).abs(), torch.inf)
    c.keep_and_renormalize(_mask_until_mass(distance, c.p, params["typical"]), active)


def _mask_until_mass(keys: Tensor, p: Tensor, mass: Tensor) -> Tensor:
    """Which columns, taken in ascending order of their keys, it takes to reach a mass."""
    _, columns = torch.sort(keys, dim=-1, stable=True)
    sorted_p = p.gather(1, columns)
    kept = sorted_p.cumsum(-1) - sorted_p < (mass - THRESHOLD_TOLERANCE).clamp_min(THRESHOLD_TOLERANCE)
    return torch.zeros_like(kept).scatter_(1, columns, kept)


TruncationFn = Callable[[Candidates, BatchParams, Tensor | None], None]
TRUNCATIONS: tuple[tuple[str, TruncationFn], ...] = (
    ("top_p", top_p),
    ("top_a", top_a),
    ("min_p", min_p),
    ("tfs", tfs),
    ("typical", typical),
)


def mirostat(c: Candidates, mus: Tensor, active: Tensor | None) -> None:
    """Tokens no more surprising, in bits, than each row's target (rows, 1); at least the most probable."""
    min_prob = torch.exp2(-mus) * (1.0 - THRESHOLD_TOLERANCE)
    c.keep_and_renormalize(c.p >= torch.minimum(min_prob, c.p.amax(-1, keepdim=True)), active)


def updated_mus(mus: Tensor, tau: Tensor, eta: Tensor, p: Tensor) -> Tensor:
    """The targets after tokens of probability p were picked."""
    return mus + eta * (tau + p.log2())


def final_temperature(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """Probabilities to the power of one over the temperature."""
    _apply_temperature(c, params["final_temperature"].expand(len(c.p), 1), active)


def dynamic_temperature(c: Candidates, params: BatchParams, active: Tensor | None) -> None:
    """A temperature between min_temp and max_temp, by how near the candidates are to equally probable.

    Below 0.01 it leaves only the most probable token, as everywhere.
    """
    entropy = -torch.special.xlogy(c.p, c.p).sum(-1, keepdim=True)
    count = (c.p > 0).sum(-1, keepdim=True)
    max_entropy = torch.where(count > 1, count.double().log(), 1.0)
    relative_entropy = (entropy / max_entropy).clamp(0.0, 1.0) ** params["exponent"]
    _apply_temperature(
        c, params["min_temp"] + (params["max_temp"] - params["min_temp"]) * relative_entropy, active
    )


def _apply_temperature(c: Candidates, temperature: Tensor, active: Tensor | None) -> None:
    if active is not None:
        temperature = torch.where(active, temperature, 1.0)
    top, top_column = c.p.max(-1, keepdim=True)
    power = (c.p / top).log() / temperature.clamp_min(GREEDY_BELOW_TEMPERATURE)
    is_top = torch.arange(c.p.shape[1], device=c.p.device) == top_column
    weights = torch.where((temperature >= GREEDY_BELOW_TEMPERATURE) | is_top, power, -torch.inf).exp()
    c.p = weights / weights.sum(-1, keepdim=True)


def xtc(c: Candidates, params: BatchParams, exempt: Tensor | None) -> None:
    """Scale down all but the least probable token above the threshold; `spared` ones (rows, k) never count.

    Rows that do not use it have a probability of exclusion of 0, which changes nothing.
    """
    above_threshold = (c.p >= params["xtc_threshold"] * (1.0 - THRESHOLD_TOLERANCE)) & (c.p > 0)
    if exempt is not None:
        above_threshold &= ~exempt
    lowest_prob = torch.where(above_threshold, c.p, torch.inf).amin(-1, keepdim=True)
    columns = torch.arange(c.p.shape[1], device=c.p.device)
    # Of equally probable tokens the last one stays, which in descending order is the last of all.
    kept_column = torch.where(above_threshold & (c.p == lowest_prob), columns, -1).amax(-1, keepdim=True)
    excluded = above_threshold & (columns != kept_column)
    mass = torch.where(excluded, c.p, 0.0).sum(-1, keepdim=True)
    probability = params["xtc_probability"]
    scale_up = 1.0 + probability * mass / (1.0 - mass).clamp_min(1e-300)
    c.p = c.p * torch.where(excluded, 1.0 - probability, scale_up)
