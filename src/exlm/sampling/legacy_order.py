"""The order in which the old library walked along its candidates, for calls that bring their random number.

Which token a given number selects depends on that order. Candidates that no step had sorted stood in the
order of their ids, those above a threshold were gathered at the front by swapping, and asked for k top
tokens it ran a quicksort just far enough to have the first k right and walked along whatever that left.
Scripts that pass `random` to `Sampler.sample` get the same tokens here. Distributions do not depend on the
order, and nothing else uses this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEGLIGIBLE_PROB = 1e-8  # less probable candidates are moved to the end before sorting
MAX_PASSES = 100  # passes over all candidates after which a quicksort is hopeless
TARGET_MASS_FACTOR = 0.9998  # of the way along the probabilities that the walk has to go


def partial_quicksort(p: list[float], num_top: int) -> list[int]:
    """Places of the candidates: the `count` most probable in order, then the rest as quicksort leaves it.

    Where the quicksort would take for ever, on what is nearly sorted already, all of them in order.
    """
    order = list(range(len(p)))
    ranges = [(0, _move_negligible_to_end(p, order))]
    comparisons_left = MAX_PASSES * len(p)
    while ranges:
        low, high = ranges.pop()
        if low < high and low <= num_top:
            comparisons_left -= high - low
            if comparisons_left < 0:
                return sorted(range(len(p)), key=lambda place: -p[place])
            middle = _partition(p, order, low, high)
            ranges += ((low, middle - 1), (middle + 1, high))
    return order


def gather_above_threshold(above: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the candidates above a threshold (n,) in order, and of one below it that got in, if one did.

    Each low candidate among the first was swapped with the last high one there was left. Where the two
    pointers met nobody looked: if it was at a low candidate, just swapped there or the last of all, that
    counted, too.
    """
    count = int(above.sum())
    places = torch.arange(count, device=above.device)
    low = (~above[:count]).nonzero().squeeze(1)
    places[low] = above[count:].nonzero().squeeze(1).flip(0) + count
    if count < len(above) and bool(above[count]):
        return places, low[-1:]
    return places, torch.full((1 if count == len(above) - 1 else 0,), count, device=above.device)


def inverse_cdf(p: Tensor, u: float) -> int:
    """Where along probabilities (n,) the walk ends for a uniform number; never at one that is 0."""
    nonzero = p.nonzero().squeeze(1)
    sums = p.double().cumsum(0)
    place = int((sums < TARGET_MASS_FACTOR * u * sums[-1]).sum())
    return min(max(place, int(nonzero[0])), int(nonzero[-1]))


def _move_negligible_to_end(p: list[float], order: list[int]) -> int:
    """Swap negligible candidates to the end; the last place before them."""
    here, end = 0, len(order) - 1
    while here <= end:
        if p[order[here]] < NEGLIGIBLE_PROB:
            order[here], order[end] = order[end], order[here]
            end -= 1
        else:
            here += 1
    return end


def _partition(p: list[float], order: list[int], low: int, high: int) -> int:
    """Larger than the last before it, the others after it; its new place."""
    pivot, border = p[order[high]], low
    for here in range(low, high):
        if p[order[here]] > pivot:
            order[border], order[here] = order[here], order[border]
            border += 1
    order[border], order[high] = order[high], order[border]
    return border
