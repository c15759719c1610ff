"""Which device each module goes to: sizes in, places out. A pure function that knows neither torch nor files.

Modules stay in order: a device holds a run of them, so that a state crosses each border once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DoesNotFit

GB = 1 << 30
MB = 1 << 20


@dataclass(frozen=True)
class Part:
    """What one module needs of the device it is on, in bytes."""

    name: str
    weights: int
    cache: int = 0
    workspace: int = 0  # while it runs; modules take turns, so a device needs only the largest
    shared: int = 0  # weights that are among the first module's: they cost nothing beside it


@dataclass(frozen=True)
class Space:
    """A device, and the bytes of it that may be used."""

    name: str
    free: int


@dataclass(frozen=True)
class Load:
    """What a device would hold."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    parts: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace

    def plus(self, part: Part, first: bool) -> Load:
        """With one more module; `first` says whether the model's first module is here."""
        return Load(
            self.weights + part.weights + (0 if first else part.shared),
            self.cache + part.cache,
            max(self.workspace, part.workspace),
            self.parts + 1,
        )


def place(parts: Sequence[Part], spaces: Sequence[Space], knob: str) -> list[int]:
    """For each module the number of its device: each device is filled before the next one is begun.

    That finds a placement whenever there is one. If there is none, the error says how much is missing and
    names the `knob` to turn.
    """
    places: list[int] = []
    at, load = 0, Load()
    for part in parts:
        while (grown := load.plus(part, first=at == (places[0] if places else at))).total > spaces[at].free:
            at, load = at + 1, Load()
            if at == len(spaces):
                raise _misfit(parts, places, spaces, knob)
        load = grown
        places.append(at)
    return places


def loads(parts: Sequence[Part], places: Sequence[int], devices: int) -> list[Load]:
    """What each device holds under a placement."""
    out = [Load()] * devices
    for part, at in zip(parts, places, strict=True):
        out[at] = out[at].plus(part, first=at == places[0])
    return out


def _misfit(parts: Sequence[Part], placed: Sequence[int], spaces: Sequence[Space], knob: str) -> DoesNotFit:
    missing = parts[len(placed)]
    whole = loads(parts, [0] * len(parts), 1)[0]
    had = ", ".join(f"{space.name} {size(space.free)}" for space in spaces)
    return DoesNotFit(
        f"Insufficient memory for model and cache: {len(placed)} of {len(parts)} modules fit, {missing.name} "
        f"does not. All together need {size(whole.total)} (weights {size(whole.weights)}, cache "
        f"{size(whole.cache)}, workspace {size(whole.workspace)}); usable are {had}. {knob}"
    )


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GB:,.2f} GB" if count >= GB // 10 else f"{count / MB:,.1f} MB"
