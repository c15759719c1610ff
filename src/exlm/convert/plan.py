"""The plan of a conversion: what becomes of each tensor, decided from headers before anything is written.

A matrix is kept (its tensors are copied), rewritten in another layout of the same numbers, unpacked to
floats, or refused with the reason. A step knows the names and the size of its tensors, and makes them when it
is run.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import spec
from ..errors import Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..formats.gguf import BLOCK_LAYOUTS
from ..spec.model import Matrix, matrices
from ..spec.tensor_names import TensorLocation, TensorNames

TensorAction = Literal["keep", "rewrite", "unpack"]
NamedTensors = Iterable[tuple[str, Tensor]]

CPU = torch.device("cpu")
PACKED_FORMATS = ("exl2", "gptq", "gptq_v2", "awq")

KEPT_FORMATS: dict[str, tuple[str, ...]] = {
    "safetensors": ("dense", *PACKED_FORMATS),
    "dense": ("dense",),
    "exl2": ("dense", "exl2"),
    "gptq": ("dense", "gptq"),
    "gptq-v2": ("dense", "gptq_v2"),
}
"""By the target of a conversion, the formats of matrices that are kept."""

REWRITABLE_FORMATS: dict[str, tuple[str, ...]] = {"gptq": ("gptq_v2", "awq"), "gptq-v2": ("gptq", "awq")}
"""By target, the formats that can be rewritten, unless a zero point does not fit."""

DEQUANTIZE_CHUNK = 2**22
"""Weights that are dequantised at once."""

_LAYER = re.compile(r"layers\.(\d+)\.")


class ConversionStep(NamedTuple):
    """One step of a conversion: the names of its tensors, their approximate bytes, and how to make them."""

    label: str
    names: tuple[str, ...]
    nbytes: int
    make_tensors: Callable[[], NamedTensors]


class VectorSpec(NamedTuple):
    """A tensor that no matrix product uses: a norm's weight, perhaps with a bias, or a position table."""

    role: str
    shapes: tuple[tuple[int, ...], ...]
    bias: bool = False


@dataclass(frozen=True)
class ConversionPlan:
    """All steps, and by role the format in which each matrix is stored and its action."""

    to: str
    steps: tuple[ConversionStep, ...]
    actions: Mapping[str, tuple[str, TensorAction]]

    @property
    def nbytes(self) -> int:
        """The approximate size of the new weights."""
        return sum(step.nbytes for step in self.steps)

    def has_action(self, action: TensorAction) -> bool:
        return any(found == action for _, found in self.actions.values())


class ConversionPlanner(ABC):
    """Makes a `ConversionPlan`; a subclass for each container plans its matrices and other tensors."""

    def __init__(self, model: spec.Model, to: str, has_head: bool) -> None:
        self.model = model
        self.to = to
        self.has_head = has_head  # whether the files hold one
        self.actions: dict[str, tuple[str, TensorAction]] = {}

    @abstractmethod
    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """The step for a matrix; records its action."""

    @abstractmethod
    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        """The step for a vector."""

    @abstractmethod
    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """Steps for the tensors that belong to no role."""

    def plan(self) -> ConversionPlan:
        """The plan, in the order of the layers; `Unsupported` if it would lose anything."""
        tied = self.model.head.tied and not self.has_head
        parts: list[VectorSpec | Matrix] = [Matrix("embed", self.model.hidden, self.model.vocab)]
        parts += vector_specs(self.model)
        parts += [m for m in matrices(self.model) if not (tied and m.role == "head")]
        parts.sort(key=lambda part: _sort_key(part.role))
        steps = [self.plan_vector(p) if isinstance(p, VectorSpec) else self.plan_matrix(p) for p in parts]
        self._check_has_quantized(next(iter(matrices(self.model))).role)
        steps += self.plan_unassigned()
        _check_names(steps, self.model.names)
        return ConversionPlan(self.to, tuple(steps), self.actions)

    def target_location(self, role: str) -> TensorLocation:
        """Where the new model stores a role: the first of the family's locations."""
        return self.model.names.locations_of(role)[0]

    def choose_action(self, role: str, fmt: str) -> TensorAction:
        """The action for a matrix stored in this format; `Unsupported` if its numbers would change."""
        action: TensorAction
        if fmt in KEPT_FORMATS[self.to]:
            action = "keep"
        elif fmt in REWRITABLE_FORMATS.get(self.to, ()):
            action = "rewrite"
        elif self.to == "dense" and (fmt in PACKED_FORMATS or fmt.removeprefix("gguf ") in BLOCK_LAYOUTS):
            action = "unpack"
        else:
            raise lossy_conversion_error(role, fmt, self.to)
        self.actions[role] = fmt, action
        return action

    def _check_has_quantized(self, role: str) -> None:
        """Refuse a quantised target for a model without quantised matrices: that would need rounding."""
        stored = {fmt for fmt, _ in self.actions.values()}
        if self.to in ("safetensors", "dense") or stored & set(PACKED_FORMATS):
            return
        raise Unsupported(
            f"{role} is stored as {self.actions[role][0]}, and so is every other matrix: to become {self.to} "
            "their numbers would have to be rounded, which is quantising and not converting. "
            'Convert to "safetensors", which keeps them.'
        )


def vector_specs(model: spec.Model) -> Iterator[VectorSpec]:
    """Every tensor of a model but its matrices."""
    hidden_shape = (model.hidden,)
    if model.embed.learned_positions:
        yield VectorSpec("positions", ((model.embed.learned_positions, model.hidden),))
    for i, layer in enumerate(model.layers):
        prefix, attn = f"layers.{i}.", layer.attention
        for name in ("attn_norm", "mlp_norm", "attn_post", "mlp_post"):
            norm: spec.Norm | None = getattr(layer, name)
            if norm is not None and not (layer.parallel and name != "attn_norm"):
                yield VectorSpec(prefix + name, (hidden_shape,), norm.bias)
        if attn is not None and attn.qk_norm is not None:
            for part, heads in (("q", attn.heads), ("k", attn.kv_heads)):
                shapes: tuple[tuple[int, ...], ...] = ((attn.head_dim,), (heads, attn.head_dim))
                if attn.qk_norm.scope == "all":
                    shapes = ((heads * attn.head_dim,),)
                yield VectorSpec(f"{prefix}attn.{part}_norm", shapes, attn.qk_norm.norm.bias)
    yield VectorSpec("final_norm", (hidden_shape,), model.final_norm.bias)


def dense_tensors(weight: Weight, location: TensorLocation) -> dict[str, Tensor]:
    """A matrix as plain floats, transposed if the location says so, with its bias."""
    data = weight.data if isinstance(weight, DenseWeight) else dequantize_in_chunks(weight)
    tensors = {"weight": data.T.contiguous() if location.transposed else data}
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def dequantize_in_chunks(weight: Weight) -> Tensor:
    """The weight (out_features, in_features) in its own precision, dequantised a few outputs at a time."""
    assert isinstance(weight, PackedWeight)
    out = torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype)
    step = max(1, DEQUANTIZE_CHUNK // weight.in_features)
    for start in range(0, weight.out_features, step):
        stop = min(start + step, weight.out_features)
        out[start:stop] = weight.take_columns(torch.arange(start, stop)).dequantize().T
    return out


def lossy_conversion_error(role: str, fmt: str, to: str) -> Unsupported:
    """The error for a matrix that cannot be converted without loss."""
    remedy = ""
    if to != "dense" and (fmt in PACKED_FORMATS or fmt.removeprefix("gguf ") in BLOCK_LAYOUTS):
        remedy = ' Convert to "dense", which keeps its numbers as plain floats.'
    return Unsupported(f"{role} is stored as {fmt} and cannot become {to}: {_lossy_reason(fmt, to)}.{remedy}")


def _lossy_reason(fmt: str, to: str) -> str:
    if fmt.startswith("gguf "):
        if to == "dense":
            return "this type has no exact reader, only one that rounds to float16"
        if to == "safetensors":
            return "safetensors has no format for GGUF's blocks"
        return "its numbers are float32, and those of the new format would be rounded to float16"
    if fmt not in ("dense", *PACKED_FORMATS):
        return "this version cannot read that format"
    if to == "exl2":
        return "EXL2 has squared 4-bit scales, and these are plain 16-bit ones"
    return "GPTQ has one width and plain scales, and this has several widths and squared 4-bit scales"


def _sort_key(role: str) -> float:
    if found := _LAYER.match(role):
        return int(found[1])
    return -1 if role in ("embed", "positions") else float("inf")


def _check_names(steps: Iterable[ConversionStep], names: TensorNames) -> None:
    """Refuse two tensors with the same name, or with names that the reader takes for the same role."""
    seen: dict[str, str] = {}
    for step in steps:
        for name in step.names:
            other = seen.setdefault(names.to_llama_key(name), step.label)
            if other != step.label:
                raise Unsupported(f"{other} and {step.label} would both be called {name} in the new model.")
