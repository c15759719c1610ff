"""The sampler, one row at a time, in plain Python floats: what every step means, written from its definition.

No torch, no batching, no cleverness. Slow on purpose; the tests hold the real one against it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from exlm.sampling import Settings

THRESHOLD_TOLERANCE = 1e-6
BLOCKED_LOGIT = -1e30
Probabilities = dict[int, float]


def apply_cfg(positive: Sequence[float], negative: Sequence[float], scale: float) -> list[float]:
    """Classifier-free guidance."""

    def log_softmax(x: Sequence[float]) -> list[float]:
        top = max(x)
        total = top + math.log(math.fsum(math.exp(v - top) for v in x))
        return [v - total for v in x]

    return [scale * a + (1 - scale) * b for a, b in zip(log_softmax(positive), log_softmax(negative), strict=True)]


def apply_penalties(x: Sequence[float], context: Sequence[int], s: Settings) -> list[float]:
    """Repetition, frequency and presence penalties: a walk backwards through the context."""
    x = list(x)
    sustain = len(context) if s.token_repetition_range < 0 else s.token_repetition_range
    decay = s.token_repetition_decay
    seen: set[int] = set()
    for distance, token in enumerate(reversed(context)):
        if distance >= sustain + decay:
            break
        strength = 1.0 if distance < sustain else 1.0 - (distance - sustain) / decay
        if not 0 <= token < len(x):
            continue
        if token not in seen:
            seen.add(token)
            factor = 1.0 + (s.token_repetition_penalty - 1.0) * strength
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
            x[token] -= s.token_presence_penalty * strength
        x[token] -= s.token_frequency_penalty * strength
    return x


def dry_penalties(context: Sequence[int], s: Settings, breakers: Collection[int], size: int) -> Probabilities:
    """For every earlier place, how long a copy of the context's end ends there; the longest ones count."""

    def is_matchable(token: int) -> bool:
        return token not in breakers and 0 <= token < size

    n = len(context)
    start = max(0, n - s.dry_range) if s.dry_range > 0 else 0
    lengths: dict[int, int] = {}
    for place in range(start, n - 1):
        length = 0
        while (
            length < s.dry_max_ngram
            and place - length >= start
            and context[place - length] == context[n - 1 - length]
            and is_matchable(context[place - length])
        ):
            length += 1
        if length >= max(1, s.dry_allowed_length) and is_matchable(context[place + 1]):
            lengths[place] = length
    if not lengths:
        return {}
    longest = max(lengths.values())
    cost = s.dry_multiplier * s.dry_base ** (longest - s.dry_allowed_length)
    costs: Probabilities = {}
    for place, length in lengths.items():
        if length == longest:
            costs[context[place + 1]] = costs.get(context[place + 1], 0.0) + cost
    return costs


def edit_logits(
    x: Sequence[float],
    s: Settings,
    context: Sequence[int] = (),
    blocked: Collection[int] = (),
    allowed: Collection[int] | None = None,
    breakers: Collection[int] = (),
) -> list[float]:
    """Everything that happens to logits before the softmax, but guidance."""
    y = apply_penalties(x, context, s)
    for token in blocked:
        y[token] = BLOCKED_LOGIT
    if s.token_bias is not None:
        y = [v + b for v, b in zip(y, s.token_bias.tolist(), strict=False)]
    if s.dry_multiplier > 0:
        for token, cost in dry_penalties(context, s, breakers, len(y)).items():
            y[token] -= cost
    if allowed is not None:
        y = [v if token in allowed else -math.inf for token, v in enumerate(y)]
    return y


def top_n_sigma(x: Sequence[float], n: float) -> list[float]:
    """Exclude logits more than n deviations below the largest; excluded and blocked ones do not count."""
    counted = [v for v in x if v > BLOCKED_LOGIT / 2]
    mean = math.fsum(counted) / max(1, len(counted))
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in counted) / max(1, len(counted)))
    return [v if max(x) - v <= n * sigma * (1 + THRESHOLD_TOLERANCE) else -math.inf for v in x]


def normalized(p: Mapping[int, float]) -> Probabilities:
    """Candidates with a probability, which add up to 1, most probable first, then lowest id."""
    total = math.fsum(p.values())
    return {t: v / total for t, v in sorted(p.items(), key=lambda item: (-item[1], item[0])) if v > 0}


def softmax(x: Sequence[float], temperature: float, smoothing: float) -> Probabilities:
    """Probabilities of logits, with quadratic smoothing if any."""
    top = max(x)

    def exponent(v: float) -> float:
        return -smoothing * (v - top) ** 2 if smoothing > 0 else v - top

    return normalized({token: math.exp(exponent(v) / temperature) for token, v in enumerate(x) if v > -math.inf})


def top_p(p: Probabilities, limit: float) -> Probabilities:
    """The smallest prefix that reaches the limit."""
    kept: Probabilities = {}
    before = 0.0
    for token, v in p.items():
        if kept and before >= limit - THRESHOLD_TOLERANCE:
            break
        kept[token] = v
        before += v
    return normalized(kept)


def at_least(p: Probabilities, limit: float) -> Probabilities:
    """Tokens with this probability, or the best one."""
    limit = min(limit * (1 - THRESHOLD_TOLERANCE), max(p.values()))
    return normalized({token: v for token, v in p.items() if v >= limit})


def tfs(p: Probabilities, limit: float) -> Probabilities:
    """Tail-free sampling."""
    p = {token: v for token, v in p.items() if v >= 1e-8}
    v = list(p.values())
    curvature = [abs(v[i] - 2 * v[i + 1] + v[i + 2]) for i in range(len(v) - 2)]
    total = math.fsum(curvature)
    if total <= 1e-14:
        return normalized(p)
    kept, spent = 1, 0.0
    for step_curvature in curvature:
        spent += step_curvature
        if spent / total > limit + THRESHOLD_TOLERANCE:
            break
        kept += 1
    return normalized(dict(list(p.items())[:kept]))


def typical(p: Probabilities, limit: float) -> Probabilities:
    """Locally typical sampling."""
    entropy = -math.fsum(v * math.log(v) for v in p.values())
    kept: Probabilities = {}
    reached = 0.0
    for token, v in sorted(p.items(), key=lambda item: abs(-math.log(item[1]) - entropy)):
        if kept and reached >= limit - THRESHOLD_TOLERANCE:
            break
        kept[token] = v
        reached += v
    return normalized(kept)


def apply_temperature(p: Probabilities, temperature: float) -> Probabilities:
    """Probabilities to a power; below 0.01 only the best one."""
    if temperature < 0.01:
        return {next(iter(p)): 1.0}
    top = max(p.values())
    return normalized({token: (v / top) ** (1 / temperature) for token, v in p.items()})


def dynamic_temperature(p: Probabilities, low: float, high: float, exponent: float) -> Probabilities:
    """A temperature that follows entropy."""
    entropy = -math.fsum(v * math.log(v) for v in p.values())
    share = max(0.0, entropy / (math.log(len(p)) if len(p) > 1 else 1.0)) ** exponent
    return apply_temperature(p, low + (high - low) * min(1.0, share))


def xtc(p: Probabilities, probability: float, threshold: float, ignored: Collection[int]) -> Probabilities:
    """Exclude top choices, in expectation."""
    above_threshold = [t for t, v in p.items() if v >= threshold * (1 - THRESHOLD_TOLERANCE) and t not in ignored]
    if len(above_threshold) < 2:
        return p
    excluded = set(above_threshold[:-1])
    mass = math.fsum(p[token] for token in excluded)
    scale_up = 1 + probability * mass / (1 - mass)
    return normalized({token: v * (1 - probability if token in excluded else scale_up) for token, v in p.items()})


def adaptive_p(p: Probabilities, target: float, mean: float) -> Probabilities:
    """Prefer tokens near a target, corrected by how far the mean so far lies beside it."""
    target = min(max(2 * target - mean, 0.0), 1.0)
    logits = {}
    for token, v in p.items():
        distance = abs(v - target) / 0.3
        logits[token] = 5.0 - 10.0 * distance**2 / (1.0 + distance)
    return normalized({token: math.exp(logit) for token, logit in logits.items()})


def adaptive_mean(mean: float, decay: float, probability: float) -> float:
    """The weighted sum of the probabilities over the sum of their weights, which decay with every token."""
    weighted_sum, total_weight = mean / (1 - decay), 1 / (1 - decay)
    return (probability + decay * weighted_sum) / (1 + decay * total_weight)


def distribution(
    x: Sequence[float],
    s: Settings,
    mu: float | None = None,
    ignored: Collection[int] = (),
    mean: float | None = None,
) -> Probabilities:
    """Final probabilities for edited logits, most probable first; `mean` is adaptive-p's."""
    if s.temperature < 0.01 or s.top_k == 1:
        return {max(range(len(x)), key=lambda token: (x[token], -token)): 1.0}
    if s.top_n_sigma > 0:
        x = top_n_sigma(x, s.top_n_sigma)
    p = softmax(x, 1.0 if s.temperature_last else s.temperature, s.smoothing_factor)
    if 0 < s.top_k < len(x):
        p = normalized(dict(list(p.items())[: s.top_k]))
    if 0 < s.top_p < 1:
        p = top_p(p, s.top_p)
    if s.top_a > 0:
        p = at_least(p, s.top_a * max(p.values()) ** 2)
    if 0 < s.min_p < 1:
        p = at_least(p, s.min_p * max(p.values()))
    if 0 < s.tfs < 1:
        p = tfs(p, s.tfs)
    if 0 < s.typical < 1:
        p = typical(p, s.typical)
    if s.mirostat:
        p = at_least(p, 2.0 ** -(mu or 2 * s.mirostat_tau))
    if s.max_temp > s.min_temp:
        p = dynamic_temperature(p, s.min_temp, s.max_temp, s.temp_exponent)
    elif s.temperature_last:
        p = apply_temperature(p, s.temperature)
    if s.xtc_probability > 0:
        p = xtc(p, s.xtc_probability, s.xtc_threshold, ignored)
    if s.adaptive_target >= 0:
        p = adaptive_p(p, s.adaptive_target, s.adaptive_target if mean is None else mean)
    return p
