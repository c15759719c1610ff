"""What an adapter's module names stand for: the matrices of a model by every name its family's files know.

A name may stand for several matrices, where files fuse them; each of them is then some outputs of the named
module. Nothing is read or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..spec.names import Span
from ..spec.roles import Matrix, matrices


@dataclass(frozen=True)
class Part:
    """One matrix of a named module, and which of the module's outputs are its own; () are all."""

    role: str
    rows: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Target:
    """A module as an adapter sees it."""

    in_features: int
    out_features: int
    parts: tuple[Part, ...]


class Targets:
    """Every module of a model that an adapter may change, by its name in Llama's spelling."""

    def __init__(self, model: spec.Model) -> None:
        self._names = model.names
        found: dict[str, list[tuple[Matrix, Part]]] = {}
        # A lookup is a product with the ids' unit vectors.
        table = Matrix("embed", model.vocab, model.hidden)
        for matrix in (table, *matrices(model)):
            for place in model.names.find(matrix.role):
                if not place.slab:  # experts stacked in one tensor are no module
                    found.setdefault(place.key, []).append((matrix, Part(matrix.role, place.rows)))
        self._targets = {key: _target(parts) for key, parts in found.items()}

    def find(self, module: str) -> Target | None:
        """What a module's stored name stands for; None if nothing."""
        return self._targets.get(self._names.canonical(module + ".weight").removesuffix(".weight"))


def _target(parts: list[tuple[Matrix, Part]]) -> Target:
    first = parts[0][0]
    outputs = max((stop for _, part in parts for _, stop in part.rows), default=first.out_features)
    return Target(first.in_features, outputs, tuple(part for _, part in parts))
