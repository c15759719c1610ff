"""Bits given to where they help most: one choice for each slot, within a budget, always the same one.

Each slot's choices are thinned to the lower edge of harm over bits, and steps along the edges are taken by
what a bit buys. What then is left of the budget is spent on single choices off the edges. Pure numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InputError
from .measurement import Choice, Slot


class Allocation(NamedTuple):
    """A choice for each slot."""

    choices: tuple[Choice, ...]

    @property
    def bits(self) -> int:
        """Bits in all."""
        return sum(choice.bits for choice in self.choices)

    @property
    def kl_cost(self) -> float:
        """Harm in all."""
        return sum(choice.kl_cost for choice in self.choices)


def allocate_budget(slots: Sequence[Slot], budget: int, weights: int) -> Allocation:
    """The least harm for at most `budget` bits; `weights` numbers share them, for the message.

    `InputError` if even the smallest choices take more.
    """
    edges = [lower_hull(slot) for slot in slots]
    at = [0] * len(edges)
    used = sum(line[0].bits for line in edges)
    if used > budget:
        raise InputError(
            f"{budget / weights:.3f} bits a weight cannot be reached: the smallest this model can be is "
            f"{used / weights:.3f}, scales and orders of rows included. Ask for more bits."
        )
    full: set[int] = set()
    for number, step in _hull_steps(edges):
        cost = edges[number][step + 1].bits - edges[number][step].bits
        if number in full or used + cost > budget:
            full.add(number)
            continue
        used, at[number] = used + cost, step + 1
    return Allocation(tuple(_spend_rest(slots, list(_choices_at(edges, at).choices), budget - used)))


def allocate_kl(slots: Sequence[Slot], max_kl: float) -> Allocation:
    """The fewest bits whose harm is at most `harm`; `InputError` if no choice is so good."""
    edges = [lower_hull(slot) for slot in slots]
    at = [0] * len(edges)
    left = sum(line[0].kl_cost for line in edges)
    for number, step in _hull_steps(edges):
        if left <= max_kl and _choices_at(edges, at).kl_cost <= max_kl:  # a running sum drifts
            break
        left += edges[number][step + 1].kl_cost - edges[number][step].kl_cost
        at[number] = step + 1
    found = _choices_at(edges, at)
    if found.kl_cost > max_kl:
        raise InputError(
            f"A divergence of {max_kl:g} cannot be reached: at the most bits EXL2 has, about "
            f"{found.kl_cost:.2g} is expected. Allow more."
        )
    return found


def min_kl_cost(slots: Sequence[Slot]) -> float:
    """The harm of the most bits there are."""
    return sum(lower_hull(slot)[-1].kl_cost for slot in slots)


def lower_hull(slot: Slot) -> list[Choice]:
    """The choices that no mixture of two others beats, from few bits to many."""
    line: list[Choice] = []
    for choice in sorted(slot, key=lambda one: (one.bits, one.kl_cost)):
        if line and choice.kl_cost >= line[-1].kl_cost:
            continue
        while len(line) > 1 and _saved_per_bit(line[-2], line[-1]) <= _saved_per_bit(line[-2], choice):
            line.pop()
        line.append(choice)
    return line


def _choices_at(edges: Sequence[Sequence[Choice]], at: Sequence[int]) -> Allocation:
    """The choices at these places of the edges."""
    return Allocation(tuple(line[place] for line, place in zip(edges, at, strict=True)))


def _saved_per_bit(a: Choice, b: Choice) -> float:
    """Harm saved by each bit of the step from a to b."""
    return (a.kl_cost - b.kl_cost) / (b.bits - a.bits)


def _hull_steps(edges: Sequence[Sequence[Choice]]) -> list[tuple[int, int]]:
    """(slot, step along its edge), the best bargain first; ties in the order of the slots."""
    steps = [
        (-_saved_per_bit(line[i], line[i + 1]), n, i)
        for n, line in enumerate(edges)
        for i in range(len(line) - 1)
    ]
    return [(number, step) for _, number, step in sorted(steps)]


def _spend_rest(slots: Sequence[Slot], chosen: list[Choice], left: int) -> list[Choice]:
    """Spend what is left, each time on the choice that saves most harm."""
    while True:
        best, where = 0.0, None
        for number, slot in enumerate(slots):
            for choice in slot:
                saved = chosen[number].kl_cost - choice.kl_cost
                if saved > best and choice.bits - chosen[number].bits <= left:
                    best, where = saved, (number, choice)
        if where is None:
            return chosen
        number, choice = where
        left -= choice.bits - chosen[number].bits
        chosen[number] = choice
