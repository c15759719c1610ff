"""What an adapter's module names stand for: the matrices of a model by every name its family's files know.

A name may stand for several matrices, where files fuse them; each of them is then some outputs of the named
module. Nothing is read or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..spec.tensor_names import RowRange
from ..spec.weight_roles import Matrix, matrices


@dataclass(frozen=True)
class TargetMatrix:
    """One matrix of a named module, and which of the module's outputs are its own; () are all."""

    role: str
    output_spans: tuple[RowRange, ...] = ()


@dataclass(frozen=True)
class TargetModule:
    """A module as an adapter sees it."""

    in_features: int
    out_features: int
    matrices: tuple[TargetMatrix, ...]


class TargetModules:
    """Every module of a model that an adapter may change, by its name in Llama's spelling."""

    def __init__(self, model: spec.Model) -> None:
        self._names = model.names
        found: dict[str, list[tuple[Matrix, TargetMatrix]]] = {}
        # A lookup is a product with the ids' unit vectors.
        embedding = Matrix("embed", model.vocab, model.hidden)
        for matrix in (embedding, *matrices(model)):
            for location in model.names.locations_of(matrix.role):
                if not location.expert_rows:  # experts stacked in one tensor are no module
                    found.setdefault(location.key, []).append(
                        (matrix, TargetMatrix(matrix.role, location.rows))
                    )
        self._targets = {key: _target(parts) for key, parts in found.items()}

    def find(self, module: str) -> TargetModule | None:
        """What a module's stored name stands for; None if nothing."""
        return self._targets.get(self._names.to_llama_key(module + ".weight").removesuffix(".weight"))


def _target(parts: list[tuple[Matrix, TargetMatrix]]) -> TargetModule:
    first = parts[0][0]
    outputs = max((stop for _, part in parts for _, stop in part.output_spans), default=first.out_features)
    return TargetModule(first.in_features, outputs, tuple(part for _, part in parts))
