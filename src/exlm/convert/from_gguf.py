"""The plan for a GGUF file: its tensors by role, as a folder of safetensors would have them.

The reader has already undone what GGUF's converter changed, so a matrix of floats is kept and a quantised one
can only be unpacked. Tensors without a role have no name outside GGUF and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from .. import spec
from ..checkpoint import GgufCheckpoint
from ..checkpoint.gguf_file import ROPE_FACTORS
from ..checkpoint.lookup import key_at
from ..errors import Unsupported
from ..spec.tensor_names import TensorLocation
from ..spec.weight_roles import Matrix
from .plan import CPU, ConversionPlanner, ConversionStep, NamedTensors, VectorSpec, dense_tensors


class GgufPlanner(ConversionPlanner):
    """Plans the conversion of a GGUF file."""

    def __init__(self, checkpoint: GgufCheckpoint, model: spec.Model, to: str) -> None:
        super().__init__(model, to)
        self.checkpoint = checkpoint
        self.used_names = set(ROPE_FACTORS)  # these go into config.json

    def has(self, role: str) -> bool:
        """Whether the file holds this role."""
        return self.checkpoint.has(role)

    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """Floats as they are, blocks as the float32 they stand for."""
        words, nbytes = self.checkpoint.describe(m.role)
        form = "dense" if words.startswith("dense ") else words
        if self.choose_action(m.role, form) == "unpack":
            nbytes = 4 * m.out_features * (m.in_features + m.bias)
        self._mark_used(m.role)
        place = self.target_place(m.role)
        names = [key_at(place, suffix) for suffix in ("weight", "bias")[: 1 + m.bias]]
        return ConversionStep(m.role, tuple(names), nbytes, partial(self._dequantized_tensors, m, place))

    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        """In float32, which is what files have and holds whatever else they might."""
        self.checkpoint.describe(v.role)
        self._mark_used(v.role)
        place = self.target_place(v.role)
        names = {key_at(place, suffix): suffix for suffix in ("weight", "bias")[: 1 + v.bias]}
        size = 4 * max(torch.Size(shape).numel() for shape in v.shapes)
        return ConversionStep(
            v.role, tuple(names), size * len(names), partial(self._vector_tensors, v, names)
        )

    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """Nothing: a tensor that no role explains would be lost."""
        left = [name for name in self.checkpoint.files.tensors if name not in self.used_names]
        if left:
            others = f" and {len(left) - 1} more" if left[1:] else ""
            raise Unsupported(
                f"{self.checkpoint.files.entry(left[0])}{others}: this model has no use for it, and it has "
                "no name outside GGUF: it would be lost."
            )
        return ()

    def _mark_used(self, role: str) -> None:
        stored = self.checkpoint.stored(role)
        assert stored is not None
        self.used_names |= {f"{stored.key}.weight", f"{stored.key}.bias"}

    def _dequantized_tensors(self, m: Matrix, place: TensorLocation) -> NamedTensors:
        weight = self.checkpoint.weight(
            m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU
        )
        for suffix, tensor in dense_tensors(weight, place).items():
            yield key_at(place, suffix), tensor

    def _vector_tensors(self, v: VectorSpec, names: dict[str, str]) -> NamedTensors:
        for name, suffix in names.items():
            yield (
                name,
                self.checkpoint.tensor(v.role, v.shapes, dtype=torch.float32, device=CPU, suffix=suffix),
            )
