"""What each tensor of a model becomes in another form, decided from headers before anything is written.

A matrix is kept as it lies, written anew, unpacked to floats, or refused with the reason. The work itself is
put off: a step knows what it will make and how large that is, and makes it when it is run. What lies beside
the weights is the business of `convert_files`, and the folder that of `convert`.
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
from ..formats.gguf_blocks import LAYOUTS
from ..spec.tensor_names import TensorLocation, TensorNames
from ..spec.weight_roles import Matrix, matrices

TensorAction = Literal["keep", "rewrite", "unpack"]
NamedTensors = Iterable[tuple[str, Tensor]]

CPU = torch.device("cpu")
PACKED_FORMS = ("exl2", "gptq", "gptq_v2", "awq")

KEPT_FORMS: dict[str, tuple[str, ...]] = {
    "safetensors": ("dense", *PACKED_FORMS),
    "dense": ("dense",),
    "exl2": ("dense", "exl2"),
    "gptq": ("dense", "gptq"),
    "gptq-v2": ("dense", "gptq_v2"),
}
"""The forms that stay as they are, by what a model is converted to."""

REWRITABLE_FORMS: dict[str, tuple[str, ...]] = {"gptq": ("gptq_v2", "awq"), "gptq-v2": ("gptq", "awq")}
"""The forms whose numbers another one can say, unless a zero point stands in the way."""

DEQUANTIZE_CHUNK = 2**22
"""Numbers unpacked at once."""

_LAYER = re.compile(r"layers\.(\d+)\.")


class ConversionStep(NamedTuple):
    """One part of the work: the tensors it makes, and about how many bytes they have."""

    label: str
    names: tuple[str, ...]
    nbytes: int
    make_tensors: Callable[[], NamedTensors]


class VectorSpec(NamedTuple):
    """A tensor that nothing is multiplied with: a norm's weight, perhaps with a bias, or a table."""

    role: str
    shapes: tuple[tuple[int, ...], ...]
    bias: bool = False


@dataclass(frozen=True)
class ConversionPlan:
    """All the work, and what it means for the description of the model."""

    to: str
    steps: tuple[ConversionStep, ...]
    actions: Mapping[
        str, tuple[str, TensorAction]
    ]  # of each matrix: the form it is stored in, and what becomes of it

    @property
    def nbytes(self) -> int:
        """About what the weights will take."""
        return sum(step.nbytes for step in self.steps)

    def has_action(self, action: TensorAction) -> bool:
        """Whether this is what becomes of some matrix."""
        return any(found == action for _, found in self.actions.values())


class ConversionPlanner(ABC):
    """What both containers share. `matrix`, `vector` and `rest` are theirs."""

    def __init__(self, model: spec.Model, to: str) -> None:
        self.model = model
        self.to = to
        self.actions: dict[str, tuple[str, TensorAction]] = {}

    @abstractmethod
    def has(self, role: str) -> bool:
        """Whether the files hold this role."""

    @abstractmethod
    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """What becomes of a matrix; its fate is noted."""

    @abstractmethod
    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        """A vector under its new name."""

    @abstractmethod
    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """What becomes of tensors that belong to no role."""

    def plan(self) -> ConversionPlan:
        """The whole work, in the order of the layers; `Unsupported` if something would be lost."""
        tied = self.model.head.tied and not self.has("head")
        parts: list[VectorSpec | Matrix] = [Matrix("embed", self.model.hidden, self.model.vocab)]
        parts += vector_specs(self.model)
        parts += [m for m in matrices(self.model) if not (tied and m.role == "head")]
        parts.sort(key=lambda part: _sort_key(part.role))
        steps = [self.plan_vector(p) if isinstance(p, VectorSpec) else self.plan_matrix(p) for p in parts]
        self._check_has_quantized(next(iter(matrices(self.model))).role)
        steps += self.plan_unassigned()
        _check_names(steps, self.model.names)
        return ConversionPlan(self.to, tuple(steps), self.actions)

    def target_place(self, role: str) -> TensorLocation:
        """Where the new model keeps a role: the family's first choice."""
        return self.model.names.locations_of(role)[0]

    def choose_action(self, role: str, form: str) -> TensorAction:
        """What becomes of a matrix stored in this form; `Unsupported` if its numbers would change."""
        action: TensorAction
        if form in KEPT_FORMS[self.to]:
            action = "keep"
        elif form in REWRITABLE_FORMS.get(self.to, ()):
            action = "rewrite"
        elif self.to == "dense" and (form in PACKED_FORMS or form.removeprefix("gguf ") in LAYOUTS):
            action = "unpack"
        else:
            raise lossy_conversion_error(role, form, self.to)
        self.actions[role] = form, action
        return action

    def _check_has_quantized(self, role: str) -> None:
        """A model without one quantised matrix would have to be rounded to become a quantised one."""
        stored = {form for form, _ in self.actions.values()}
        if self.to in ("safetensors", "dense") or stored & set(PACKED_FORMS):
            return
        raise Unsupported(
            f"{role} is stored as {self.actions[role][0]}, and so is every other matrix: to become {self.to} "
            "their numbers would have to be rounded, which is quantising and not converting. "
            'Convert to "safetensors", which keeps them.'
        )


def vector_specs(model: spec.Model) -> Iterator[VectorSpec]:
    """Every tensor of a model but its matrices."""
    hidden_shape = (model.hidden,)
    if model.embed.positions:
        yield VectorSpec("positions", ((model.embed.positions, model.hidden),))
    for i, layer in enumerate(model.layers):
        prefix, attn = f"layers.{i}.", layer.attn
        for name in ("attn_norm", "mlp_norm", "attn_post", "mlp_post"):
            norm: spec.Norm | None = getattr(layer, name)
            if norm is not None and not (layer.parallel and name != "attn_norm"):
                yield VectorSpec(prefix + name, (hidden_shape,), norm.bias)
        if attn.qk_norm is not None:
            for part, heads in (("q", attn.heads), ("k", attn.kv_heads)):
                shapes: tuple[tuple[int, ...], ...] = ((attn.head_dim,), (heads, attn.head_dim))
                if attn.qk_norm.scope == "all":
                    shapes = ((heads * attn.head_dim,),)
                yield VectorSpec(f"{prefix}attn.{part}_norm", shapes, attn.qk_norm.norm.bias)
    yield VectorSpec("final_norm", (hidden_shape,), model.final_norm.bias)


def dense_tensors(weight: Weight, place: TensorLocation) -> dict[str, Tensor]:
    """A matrix as plain floats, the way round its place wants it, with its bias."""
    data = weight.data if isinstance(weight, DenseWeight) else dequantize_in_chunks(weight)
    tensors = {"weight": data.T.contiguous() if place.transposed else data}
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def dequantize_in_chunks(weight: Weight) -> Tensor:
    """(out_features, in_features) in the format's own precision, a few outputs at a time."""
    assert isinstance(weight, PackedWeight)
    out = torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype)
    step = max(1, DEQUANTIZE_CHUNK // weight.in_features)
    for start in range(0, weight.out_features, step):
        stop = min(start + step, weight.out_features)
        out[start:stop] = weight.columns(torch.arange(start, stop)).dequantize().T
    return out


def lossy_conversion_error(role: str, form: str, to: str) -> Unsupported:
    """The error for a matrix that cannot be converted without loss."""
    remedy = ""
    if to != "dense" and (form in PACKED_FORMS or form.removeprefix("gguf ") in LAYOUTS):
        remedy = ' Convert to "dense", which keeps its numbers as plain floats.'
    return Unsupported(
        f"{role} is stored as {form} and cannot become {to}: {_lossy_reason(form, to)}.{remedy}"
    )


def _lossy_reason(form: str, to: str) -> str:
    if form.startswith("gguf "):
        if to == "dense":
            return "this type has no exact reader here, only one that rounds to float16"
        if to == "safetensors":
            return "a folder of safetensors has no way to say GGUF's blocks"
        return "its numbers are float32, and those of the new form would be rounded to float16"
    if form not in ("dense", *PACKED_FORMS):
        return "this version cannot read that form"
    if to == "exl2":
        return "EXL2 has squared 4-bit scales, and these are plain 16-bit ones"
    return "GPTQ has one width and plain scales, and this has several widths and squared 4-bit scales"


def _sort_key(role: str) -> float:
    if found := _LAYER.match(role):
        return int(found[1])
    return -1 if role in ("embed", "positions") else float("inf")


def _check_names(steps: Iterable[ConversionStep], names: TensorNames) -> None:
    """Two tensors of one name, or of one meaning to the reader, would hide each other."""
    seen: dict[str, str] = {}
    for step in steps:
        for name in step.names:
            other = seen.setdefault(names.to_llama_key(name), step.label)
            if other != step.label:
                raise Unsupported(f"{other} and {step.label} would both be called {name} in the new model.")
