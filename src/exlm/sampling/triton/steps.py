"""What happens to one row's candidates after top-k, on a vector in the order of probability.

Each function is the step of the same name in `truncation.py`, `temperature.py`, `mirostat.py` and `xtc.py`,
which define what is right. Probabilities are float64; 0 means out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import candidates, plan

SLACK = tl.constexpr(candidates.SLACK)
TFS_LEAST = tl.constexpr(candidates.TFS_LEAST)
COLDEST = tl.constexpr(plan.COLDEST)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def kept(p, mask):
    """Drop what is not in the mask and share its probability out."""
    left = tl.where(mask, p, 0.0)
    return left / tl.sum(left)


@triton.jit
def top_p(p, limit):
    """The smallest set of most probable tokens that reaches the limit together."""
    return kept(p, tl.cumsum(p, 0) - p < tl.maximum(limit - SLACK, SLACK))


@triton.jit
def top_a(p, a):
    """Tokens with at least a times the square of the largest probability."""
    top = tl.max(p)
    return kept(p, p >= tl.minimum(a * top * top * (1.0 - SLACK), top))


@triton.jit
def min_p(p, part):
    """Tokens with at least a given part of the largest probability."""
    return kept(p, p >= part * tl.max(p) * (1.0 - SLACK))


@triton.jit
def tfs(p, z, N: tl.constexpr):
    """Tokens before the tail, where the curve of sorted probabilities has spent its curvature."""
    places = tl.arange(0, N)
    q = tl.where(p >= TFS_LEAST, p, 0.0)
    count = tl.sum((q > 0).to(tl.int32))
    inside = places < count - 2
    second = tl.gather(q, tl.minimum(places + 1, N - 1), 0)
    third = tl.gather(q, tl.minimum(places + 2, N - 1), 0)
    bends = tl.where(inside, tl.abs(q - 2.0 * second + third), 0.0)
    total = tl.sum(bends)
    spent = inside & (tl.cumsum(bends, 0) <= (z + SLACK) * total)
    tail = tl.where(total > TFS_LEAST * SLACK, tl.sum(spent.to(tl.int32)) + 1, count)
    return kept(p, (q > 0) & (places < tail))


@triton.jit
def typical(p, mass):
    """Tokens whose surprise is nearest to what is expected, until they reach the mass together.

    How near is near enough is found by halving, on the bits of the distance.
    """
    limit = tl.maximum(mass - SLACK, SLACK)
    surprise = -tl.log(tl.where(p > 0, p, 1.0))
    expected = tl.sum(p * surprise)
    away = tl.where(p > 0, tl.abs(surprise - expected), INFINITY).to(tl.int64, bitcast=True)
    lo = tl.full([], 0, tl.int64)
    hi = tl.max(tl.where(p > 0, away, 0))
    while lo < hi:
        middle = lo + (hi - lo) // 2
        enough = tl.sum(tl.where(away <= middle, p, 0.0)) >= limit
        lo = tl.where(enough, lo, middle + 1)
        hi = tl.where(enough, middle, hi)
    nearer = tl.sum(tl.where(away < lo, p, 0.0))
    equal = tl.where(away == lo, p, 0.0)
    return kept(p, (away < lo) | ((away == lo) & (nearer + tl.cumsum(equal, 0) - equal < limit)))


@triton.jit
def mirostat(p, target):
    """Tokens no more surprising, in bits, than the target."""
    return kept(p, p >= tl.minimum(tl.exp2(-target) * (1.0 - SLACK), tl.max(p)))


@triton.jit
def tempered(p, temperature, N: tl.constexpr):
    """Probabilities to the power of one over the temperature; only the first of them if it is near zero."""
    places = tl.arange(0, N)
    top = tl.max(p)
    first = places == tl.min(tl.where(p == top, places, N))
    power = tl.log(p / top) / tl.maximum(temperature, COLDEST)
    warm = tl.exp(tl.where(first, 0.0, tl.where(temperature >= COLDEST, power, float("-inf"))))
    return warm / tl.sum(warm)


@triton.jit
def dynamic(p, low, high, exponent, N: tl.constexpr):
    """A temperature by how near the candidates are to equally probable."""
    entropy = -tl.sum(p * tl.log(tl.where(p > 0, p, 1.0)))
    count = tl.sum((p > 0).to(tl.int32))
    highest = tl.where(count > 1, tl.log(count.to(tl.float64)), 1.0)
    share = tl.minimum(tl.maximum(entropy / highest, 0.0), 1.0)
    bent = tl.where(
        share > 0,
        tl.exp(exponent * tl.log(tl.where(share > 0, share, 1.0))),
        tl.where(exponent == 0.0, 1.0, 0.0),
    )
    return tempered(p, low + (high - low) * bent, N)


@triton.jit
def xtc(p, chance, least_p, spared, N: tl.constexpr):
    """Scale down all but the least probable token above the threshold; spared ones never count."""
    places = tl.arange(0, N)
    enough = (p >= least_p * (1.0 - SLACK)) & (p > 0) & (spared == 0)
    least = tl.min(tl.where(enough, p, INFINITY))
    stays = tl.max(tl.where(enough & (p == least), places, -1))
    excluded = enough & (places != stays)
    mass = tl.sum(tl.where(excluded, p, 0.0))
    grown = 1.0 + chance * mass / tl.maximum(1.0 - mass, 1e-300)
    return p * tl.where(excluded, 1.0 - chance, grown)
