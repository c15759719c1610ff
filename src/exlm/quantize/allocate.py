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
    def harm(self) -> float:
        """Harm in all."""
        return sum(choice.harm for choice in self.choices)


def within(slots: Sequence[Slot], budget: int, weights: int) -> Allocation:
    """The least harm for at most `budget` bits; `weights` numbers share them, for the message.

    `InputError` if even the smallest choices take more.
    """
    edges = [edge(slot) for slot in slots]
    at = [0] * len(edges)
    used = sum(line[0].bits for line in edges)
    if used > budget:
        raise InputError(
            f"{budget / weights:.3f} bits a weight cannot be reached: the smallest this model can be is "
            f"{used / weights:.3f}, scales and orders of rows included. Ask for more bits."
        )
    full: set[int] = set()
    for number, step in _steps(edges):
        cost = edges[number][step + 1].bits - edges[number][step].bits
        if number in full or used + cost > budget:
            full.add(number)
            continue
        used, at[number] = used + cost, step + 1
    return Allocation(tuple(_filled(slots, list(_reached(edges, at).choices), budget - used)))


def below(slots: Sequence[Slot], harm: float) -> Allocation:
    """The fewest bits whose harm is at most `harm`; `InputError` if no choice is so good."""
    edges = [edge(slot) for slot in slots]
    at = [0] * len(edges)
    left = sum(line[0].harm for line in edges)
    for number, step in _steps(edges):
        if left <= harm and _reached(edges, at).harm <= harm:  # a running sum drifts
            break
        left += edges[number][step + 1].harm - edges[number][step].harm
        at[number] = step + 1
    found = _reached(edges, at)
    if found.harm > harm:
        raise InputError(
            f"A divergence of {harm:g} cannot be reached: at the most bits EXL2 has, about {found.harm:.2g} "
            "is expected. Allow more."
        )
    return found


def least(slots: Sequence[Slot]) -> float:
    """The harm of the most bits there are."""
    return sum(edge(slot)[-1].harm for slot in slots)


def edge(slot: Slot) -> list[Choice]:
    """The choices that no mixture of two others beats, from few bits to many."""
    line: list[Choice] = []
    for choice in sorted(slot, key=lambda one: (one.bits, one.harm)):
        if line and choice.harm >= line[-1].harm:
            continue
        while len(line) > 1 and _gain(line[-2], line[-1]) <= _gain(line[-2], choice):
            line.pop()
        line.append(choice)
    return line


def _reached(edges: Sequence[Sequence[Choice]], at: Sequence[int]) -> Allocation:
    """The choices at these places of the edges."""
    return Allocation(tuple(line[place] for line, place in zip(edges, at, strict=True)))


def _gain(a: Choice, b: Choice) -> float:
    """Harm saved by each bit of the step from a to b."""
    return (a.harm - b.harm) / (b.bits - a.bits)


def _steps(edges: Sequence[Sequence[Choice]]) -> list[tuple[int, int]]:
    """(slot, step along its edge), the best bargain first; ties in the order of the slots."""
    steps = [
        (-_gain(line[i], line[i + 1]), n, i) for n, line in enumerate(edges) for i in range(len(line) - 1)
    ]
    return [(number, step) for _, number, step in sorted(steps)]


def _filled(slots: Sequence[Slot], chosen: list[Choice], left: int) -> list[Choice]:
    """Spend what is left, each time on the choice that saves most harm."""
    while True:
        best, where = 0.0, None
        for number, slot in enumerate(slots):
            for choice in slot:
                saved = chosen[number].harm - choice.harm
                if saved > best and choice.bits - chosen[number].bits <= left:
                    best, where = saved, (number, choice)
        if where is None:
            return chosen
        number, choice = where
        left -= choice.bits - chosen[number].bits
        chosen[number] = choice
