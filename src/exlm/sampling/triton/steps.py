"""What happens to one row's candidates after top-k, on a vector in the order of probability.

Each function is the step of the same name in `truncation.py`, `temperature.py`, `mirostat.py` and `xtc.py`,
which define what is right. Probabilities are float64; 0 means out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import candidates
from .. import params as plan

THRESHOLD_TOLERANCE = tl.constexpr(candidates.THRESHOLD_TOLERANCE)
TFS_MIN_PROB = tl.constexpr(candidates.TFS_MIN_PROB)
GREEDY_BELOW_TEMPERATURE = tl.constexpr(plan.GREEDY_BELOW_TEMPERATURE)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def keep_and_renormalize(p, mask):
    """Drop what is not in the mask and share its probability out."""
    left = tl.where(mask, p, 0.0)
    return left / tl.sum(left)


@triton.jit
def top_p(p, limit):
    """The smallest set of most probable tokens that reaches the limit together."""
    return keep_and_renormalize(
        p, tl.cumsum(p, 0) - p < tl.maximum(limit - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE)
    )


@triton.jit
def top_a(p, a):
    """Tokens with at least a times the square of the largest probability."""
    top = tl.max(p)
    return keep_and_renormalize(p, p >= tl.minimum(a * top * top * (1.0 - THRESHOLD_TOLERANCE), top))


@triton.jit
def min_p(p, fraction):
    """Tokens with at least a given part of the largest probability."""
    return keep_and_renormalize(p, p >= fraction * tl.max(p) * (1.0 - THRESHOLD_TOLERANCE))


@triton.jit
def tfs(p, z, N: tl.constexpr):
    """Tokens before the tail, where the curve of sorted probabilities has spent its curvature."""
    places = tl.arange(0, N)
    q = tl.where(p >= TFS_MIN_PROB, p, 0.0)
    count = tl.sum((q > 0).to(tl.int32))
    inside = places < count - 2
    second = tl.gather(q, tl.minimum(places + 1, N - 1), 0)
    third = tl.gather(q, tl.minimum(places + 2, N - 1), 0)
    curvature = tl.where(inside, tl.abs(q - 2.0 * second + third), 0.0)
    total = tl.sum(curvature)
    spent = inside & (tl.cumsum(curvature, 0) <= (z + THRESHOLD_TOLERANCE) * total)
    tail_start = tl.where(total > TFS_MIN_PROB * THRESHOLD_TOLERANCE, tl.sum(spent.to(tl.int32)) + 1, count)
    return keep_and_renormalize(p, (q > 0) & (places < tail_start))


@triton.jit
def typical(p, mass):
    """Tokens whose surprise is nearest to what is expected, until they reach the mass together.

    How near is near enough is found by halving, on the bits of the distance.
    """
    limit = tl.maximum(mass - THRESHOLD_TOLERANCE, THRESHOLD_TOLERANCE)
    surprise = -tl.log(tl.where(p > 0, p, 1.0))
    expected = tl.sum(p * surprise)
    distance = tl.where(p > 0, tl.abs(surprise - expected), INFINITY).to(tl.int64, bitcast=True)
    lo = tl.full([], 0, tl.int64)
    hi = tl.max(tl.where(p > 0, distance, 0))
    while lo < hi:
        middle = lo + (hi - lo) // 2
        enough = tl.sum(tl.where(distance <= middle, p, 0.0)) >= limit
        lo = tl.where(enough, lo, middle + 1)
        hi = tl.where(enough, middle, hi)
    nearer = tl.sum(tl.where(distance < lo, p, 0.0))
    equal = tl.where(distance == lo, p, 0.0)
    return keep_and_renormalize(
        p, (distance < lo) | ((distance == lo) & (nearer + tl.cumsum(equal, 0) - equal < limit))
    )


@triton.jit
def mirostat(p, mu):
    """Tokens no more surprising, in bits, than the target."""
    return keep_and_renormalize(p, p >= tl.minimum(tl.exp2(-mu) * (1.0 - THRESHOLD_TOLERANCE), tl.max(p)))


@triton.jit
def apply_temperature(p, temperature, N: tl.constexpr):
    """Probabilities to the power of one over the temperature; only the first of them if it is near zero."""
    places = tl.arange(0, N)
    top = tl.max(p)
    is_top = places == tl.min(tl.where(p == top, places, N))
    power = tl.log(p / top) / tl.maximum(temperature, GREEDY_BELOW_TEMPERATURE)
    weights = tl.exp(
        tl.where(is_top, 0.0, tl.where(temperature >= GREEDY_BELOW_TEMPERATURE, power, float("-inf")))
    )
    return weights / tl.sum(weights)


@triton.jit
def dynamic_temperature(p, low, high, exponent, N: tl.constexpr):
    """A temperature by how near the candidates are to equally probable."""
    entropy = -tl.sum(p * tl.log(tl.where(p > 0, p, 1.0)))
    count = tl.sum((p > 0).to(tl.int32))
    max_entropy = tl.where(count > 1, tl.log(count.to(tl.float64)), 1.0)
    relative_entropy = tl.minimum(tl.maximum(entropy / max_entropy, 0.0), 1.0)
    fraction = tl.where(
        relative_entropy > 0,
        tl.exp(exponent * tl.log(tl.where(relative_entropy > 0, relative_entropy, 1.0))),
        tl.where(exponent == 0.0, 1.0, 0.0),
    )
    return apply_temperature(p, low + (high - low) * fraction, N)


@triton.jit
def xtc(p, probability, threshold, exempt, N: tl.constexpr):
    """Scale down all but the least probable token above the threshold; spared ones never count."""
    places = tl.arange(0, N)
    above_threshold = (p >= threshold * (1.0 - THRESHOLD_TOLERANCE)) & (p > 0) & (exempt == 0)
    lowest_prob = tl.min(tl.where(above_threshold, p, INFINITY))
    kept_place = tl.max(tl.where(above_threshold & (p == lowest_prob), places, -1))
    excluded = above_threshold & (places != kept_place)
    mass = tl.sum(tl.where(excluded, p, 0.0))
    scale_up = 1.0 + probability * mass / tl.maximum(1.0 - mass, 1e-300)
    return p * tl.where(excluded, 1.0 - probability, scale_up)
