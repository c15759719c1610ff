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
from ..spec.names import Names, Place
from ..spec.roles import Matrix, matrices

Fate = Literal["keep", "rewrite", "unpack"]
Named = Iterable[tuple[str, Tensor]]

CPU = torch.device("cpu")
PACKED = ("exl2", "gptq", "gptq_v2", "awq")

KEPT: dict[str, tuple[str, ...]] = {
    "safetensors": ("dense", *PACKED),
    "dense": ("dense",),
    "exl2": ("dense", "exl2"),
    "gptq": ("dense", "gptq"),
    "gptq-v2": ("dense", "gptq_v2"),
}
"""The forms that stay as they are, by what a model is converted to."""

REWRITTEN: dict[str, tuple[str, ...]] = {"gptq": ("gptq_v2", "awq"), "gptq-v2": ("gptq", "awq")}
"""The forms whose numbers another one can say, unless a zero point stands in the way."""

CHUNK = 2**22
"""Numbers unpacked at once."""

_LAYER = re.compile(r"layers\.(\d+)\.")


class Step(NamedTuple):
    """One part of the work: the tensors it makes, and about how many bytes they have."""

    what: str
    names: tuple[str, ...]
    nbytes: int
    make: Callable[[], Named]


class Vector(NamedTuple):
    """A tensor that nothing is multiplied with: a norm's weight, perhaps with a bias, or a table."""

    role: str
    shapes: tuple[tuple[int, ...], ...]
    bias: bool = False


@dataclass(frozen=True)
class Plan:
    """All the work, and what it means for the description of the model."""

    to: str
    steps: tuple[Step, ...]
    fates: Mapping[str, tuple[str, Fate]]  # of each matrix: the form it is stored in, and what becomes of it

    @property
    def nbytes(self) -> int:
        """About what the weights will take."""
        return sum(step.nbytes for step in self.steps)

    def any(self, fate: Fate) -> bool:
        """Whether this is what becomes of some matrix."""
        return any(found == fate for _, found in self.fates.values())


class Planner(ABC):
    """What both containers share. `matrix`, `vector` and `rest` are theirs."""

    def __init__(self, model: spec.Model, to: str) -> None:
        self.model = model
        self.to = to
        self.fates: dict[str, tuple[str, Fate]] = {}

    @abstractmethod
    def has(self, role: str) -> bool:
        """Whether the files hold this role."""

    @abstractmethod
    def matrix(self, m: Matrix) -> Step:
        """What becomes of a matrix; its fate is noted."""

    @abstractmethod
    def vector(self, v: Vector) -> Step:
        """A vector under its new name."""

    @abstractmethod
    def rest(self) -> Iterable[Step]:
        """What becomes of tensors that belong to no role."""

    def plan(self) -> Plan:
        """The whole work, in the order of the layers; `Unsupported` if something would be lost."""
        tied = self.model.head.tied and not self.has("head")
        parts: list[Vector | Matrix] = [Matrix("embed", self.model.hidden, self.model.vocab)]
        parts += vectors(self.model)
        parts += [m for m in matrices(self.model) if not (tied and m.role == "head")]
        parts.sort(key=lambda part: _depth(part.role))
        steps = [self.vector(p) if isinstance(p, Vector) else self.matrix(p) for p in parts]
        self._check_worth(next(iter(matrices(self.model))).role)
        steps += self.rest()
        _check_names(steps, self.model.names)
        return Plan(self.to, tuple(steps), self.fates)

    def first(self, role: str) -> Place:
        """Where the new model keeps a role: the family's first choice."""
        return self.model.names.find(role)[0]

    def decide(self, role: str, form: str) -> Fate:
        """What becomes of a matrix stored in this form; `Unsupported` if its numbers would change."""
        fate: Fate
        if form in KEPT[self.to]:
            fate = "keep"
        elif form in REWRITTEN.get(self.to, ()):
            fate = "rewrite"
        elif self.to == "dense" and (form in PACKED or form.removeprefix("gguf ") in LAYOUTS):
            fate = "unpack"
        else:
            raise refusal(role, form, self.to)
        self.fates[role] = form, fate
        return fate

    def _check_worth(self, role: str) -> None:
        """A model without one quantised matrix would have to be rounded to become a quantised one."""
        stored = {form for form, _ in self.fates.values()}
        if self.to in ("safetensors", "dense") or stored & set(PACKED):
            return
        raise Unsupported(
            f"{role} is stored as {self.fates[role][0]}, and so is every other matrix: to become {self.to} "
            "their numbers would have to be rounded, which is quantising and not converting. "
            'Convert to "safetensors", which keeps them.'
        )


def vectors(model: spec.Model) -> Iterator[Vector]:
    """Every tensor of a model but its matrices."""
    wide = (model.hidden,)
    if model.embed.positions:
        yield Vector("positions", ((model.embed.positions, model.hidden),))
    for i, layer in enumerate(model.layers):
        at, attn = f"layers.{i}.", layer.attn
        for name in ("attn_norm", "mlp_norm", "attn_post", "mlp_post"):
            norm: spec.Norm | None = getattr(layer, name)
            if norm is not None and not (layer.parallel and name != "attn_norm"):
                yield Vector(at + name, (wide,), norm.bias)
        if attn.qk_norm is not None:
            for part, heads in (("q", attn.heads), ("k", attn.kv_heads)):
                shapes: tuple[tuple[int, ...], ...] = ((attn.head_dim,), (heads, attn.head_dim))
                if attn.qk_norm.scope == "all":
                    shapes = ((heads * attn.head_dim,),)
                yield Vector(f"{at}attn.{part}_norm", shapes, attn.qk_norm.norm.bias)
    yield Vector("final_norm", (wide,), model.final_norm.bias)


def dense_tensors(weight: Weight, place: Place) -> dict[str, Tensor]:
    """A matrix as plain floats, the way round its place wants it, with its bias."""
    data = weight.data if isinstance(weight, DenseWeight) else unpacked(weight)
    tensors = {"weight": data.T.contiguous() if place.transposed else data}
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def unpacked(weight: Weight) -> Tensor:
    """(out_features, in_features) in the format's own precision, a few outputs at a time."""
    assert isinstance(weight, PackedWeight)
    out = torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype)
    step = max(1, CHUNK // weight.in_features)
    for start in range(0, weight.out_features, step):
        stop = min(start + step, weight.out_features)
        out[start:stop] = weight.columns(torch.arange(start, stop)).dequantize().T
    return out


def refusal(role: str, form: str, to: str) -> Unsupported:
    """The error for a matrix that cannot be converted without loss."""
    remedy = ""
    if to != "dense" and (form in PACKED or form.removeprefix("gguf ") in LAYOUTS):
        remedy = ' Convert to "dense", which keeps its numbers as plain floats.'
    return Unsupported(f"{role} is stored as {form} and cannot become {to}: {_why(form, to)}.{remedy}")


def _why(form: str, to: str) -> str:
    if form.startswith("gguf "):
        if to == "dense":
            return "this type has no exact reader here, only one that rounds to float16"
        if to == "safetensors":
            return "a folder of safetensors has no way to say GGUF's blocks"
        return "its numbers are float32, and those of the new form would be rounded to float16"
    if form not in ("dense", *PACKED):
        return "this version cannot read that form"
    if to == "exl2":
        return "EXL2 has squared 4-bit scales, and these are plain 16-bit ones"
    return "GPTQ has one width and plain scales, and this has several widths and squared 4-bit scales"


def _depth(role: str) -> float:
    if found := _LAYER.match(role):
        return int(found[1])
    return -1 if role in ("embed", "positions") else float("inf")


def _check_names(steps: Iterable[Step], names: Names) -> None:
    """Two tensors of one name, or of one meaning to the reader, would hide each other."""
    seen: dict[str, str] = {}
    for step in steps:
        for name in step.names:
            other = seen.setdefault(names.canonical(name), step.what)
            if other != step.what:
                raise Unsupported(f"{other} and {step.what} would both be called {name} in the new model.")
