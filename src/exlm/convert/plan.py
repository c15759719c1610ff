"""The plan of a conversion: what becomes of each tensor, decided from headers before anything is written.

A matrix is kept (its tensors are copied), rewritten in another layout of the same numbers, unpacked to
floats, or refused with the reason. A step knows the names and the size of its tensors, and makes them when it
is run.

A matrix gets a tensor of its own, also where the source has it in a fused one. Where the family knows it only as rows
of a fused tensor (Qwen3.5's in_proj_qkv), floats stay fused, so that other programs read the new model, and so does
a fused matrix that is kept as it is; what is rewritten goes under a key of its own (`TensorNames.own_location`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..errors import Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..formats.gguf import BLOCK_LAYOUTS
from ..spec.model import Matrix, matrices
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames

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
    """A tensor that no matrix product uses: a norm's weight, a position table, a convolution; perhaps with a bias."""

    role: str
    shapes: tuple[tuple[int, ...], ...]
    bias: bool = False
    keeps_precision: bool = False  # a parameter of a recurrence or a routing: never rounded to float16

    def shapes_of(self, suffix: str) -> tuple[tuple[int, ...], ...]:
        """The shapes of the `weight` or the `bias`, which has one number for each channel."""
        return self.shapes if suffix == "weight" else (self.shapes[0][:1],)


@dataclass(frozen=True)
class ConversionPlan:
    """All steps, and by role the format in which each matrix is stored and its action."""

    to: str
    steps: tuple[ConversionStep, ...]
    actions: Mapping[str, tuple[str, TensorAction]]
    vectors: tuple[VectorSpec, ...]

    @property
    def nbytes(self) -> int:
        """The approximate size of the new weights."""
        return sum(step.nbytes for step in self.steps)

    def has_action(self, action: TensorAction) -> bool:
        return any(found == action for _, found in self.actions.values())


class ConversionPlanner(ABC):
    """Makes a `ConversionPlan`; a subclass for each container plans its matrices and other tensors."""

    def __init__(self, checkpoint: WeightSource, model: spec.Model, to: str, separate: Set[str] = frozenset()) -> None:
        """`separate`: roles whose tensors the caller replaces, so that they must not share one with others."""
        self.source = checkpoint
        self.model = model
        self.to = to
        self.separate = separate
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
        tied = self.model.head.tied and not self.source.has("head")
        vectors = tuple(vector_specs(self.model, self.source.has))
        parts: list[VectorSpec | Matrix] = [Matrix("embed", self.model.hidden, self.model.vocab), *vectors]
        parts += [m for m in matrices(self.model) if not (tied and m.role == "head")]
        parts.sort(key=lambda part: _sort_key(part.role))
        fused = self._fused_groups(part for part in parts if isinstance(part, Matrix))
        steps: list[ConversionStep] = []
        for part in parts:
            if isinstance(part, VectorSpec):
                steps.append(self.plan_vector(part))
            elif (group := fused.get(part.role)) is None:
                steps.append(self.plan_matrix(part))
            elif part is group[0]:
                steps += self.plan_fused(group)
        self._check_has_quantized(next(iter(matrices(self.model))).role)
        steps += self.plan_unassigned()
        _check_names(steps, self.model.names)
        return ConversionPlan(self.to, tuple(steps), self.actions, vectors)

    def plan_fused(self, group: Sequence[Matrix]) -> list[ConversionStep]:
        """The steps for matrices that are all rows of one tensor in the family's files: one step if all are floats."""
        steps = [self.plan_matrix(m) for m in group]
        if any(fmt != "dense" and action != "unpack" for fmt, action in (self.actions[m.role] for m in group)):
            return steps
        suffix_of = {
            self.target_location(m.role).tensor_key(suffix): suffix for m in group for suffix in ("weight", "bias")
        }
        location, outputs = self._fused_location(group[0].role), sum(m.out_features for m in group)

        def make() -> NamedTensors:
            joined: dict[str, Tensor] = {}
            for m, step in zip(group, steps, strict=True):
                rows = torch.cat([torch.arange(*span) for span in self._fused_location(m.role).stored_rows])
                for name, part in step.make_tensors():
                    suffix = suffix_of[name]
                    whole = joined.get(suffix)
                    if whole is None:
                        whole = part.new_empty(outputs, *part.shape[1:])
                    joined[suffix] = whole = whole.to(torch.promote_types(whole.dtype, part.dtype))
                    whole[rows] = part.to(whole.dtype)
            for suffix, tensor in joined.items():
                if location.rows_per_expert:
                    tensor = tensor.view(-1, location.rows_per_expert, tensor.shape[-1])
                is_transposed = location.transposed and suffix == "weight"
                yield location.tensor_key(suffix), tensor.T.contiguous() if is_transposed else tensor

        names = tuple(location.tensor_key(suffix) for suffix in ("weight", "bias")[: 1 + group[0].bias])
        return [ConversionStep(group[0].role, names, sum(step.nbytes for step in steps), make)]

    def _fused_groups(self, parts: Iterable[Matrix]) -> dict[str, list[Matrix]]:
        """By role, the matrices that a family has only fused with it; without those in `separate` and their groups.

        Experts are stacked as (experts, rows, inputs) without biases; other forms are not put together.
        """
        groups: dict[str, list[Matrix]] = {}
        unjoined: set[str] = set()
        for m in parts:
            if (location := self.model.names.fused_location(m.role)) is None:
                continue
            group = groups.setdefault(location.key, [])
            group.append(m)
            odd_experts = location.rows_per_expert and (m.bias or location.transposed)
            if m.role in self.separate or m.bias != group[0].bias or odd_experts:
                unjoined.add(location.key)
        for key, group in groups.items():
            spans = [span for m in group for span in self._fused_location(m.role).stored_rows]
            if sorted(spans) != _consecutive(spans):  # the tensor has rows that are no matrix of the model
                unjoined.add(key)
        return {m.role: group for key, group in groups.items() if key not in unjoined for m in group}

    def target_location(self, role: str) -> TensorLocation:
        """Where the new model stores a role that has tensors of its own."""
        return self.model.names.own_location(role)

    def _fused_location(self, role: str) -> TensorLocation:
        location = self.model.names.fused_location(role)
        assert location is not None
        return location

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


def _consecutive(spans: Sequence[RowRange]) -> list[RowRange]:
    """Ranges of these lengths one after the other, in the order of their starts."""
    stops = list(accumulate(stop - start for start, stop in sorted(spans)))
    return list(zip([0, *stops], stops, strict=False))


def vector_specs(model: spec.Model, has: Callable[[str], bool]) -> Iterator[VectorSpec]:
    """Every tensor of a model but its matrices; `has` tells whether the files hold a role."""
    hidden_shape = (model.hidden,)
    if model.embed.learned_positions:
        yield VectorSpec("positions", ((model.embed.learned_positions, model.hidden),))
    for i, layer in enumerate(model.layers):
        prefix = f"layers.{i}."
        for name in ("attn_norm", "mlp_norm", "attn_post", "mlp_post"):
            norm: spec.Norm | None = getattr(layer, name)
            if norm is not None and not (layer.parallel and name != "attn_norm"):
                yield VectorSpec(prefix + name, (hidden_shape,), norm.bias)
        yield from _mixer_vectors(prefix, layer.mixer, has)
        if isinstance(layer.mlp, spec.Moe) and layer.mlp.selection_bias:
            yield VectorSpec(prefix + "mlp.selection_bias", ((layer.mlp.experts,),), keeps_precision=True)
    yield VectorSpec("final_norm", (hidden_shape,), model.final_norm.bias)


def _mixer_vectors(prefix: str, mixer: spec.Mixer | None, has: Callable[[str], bool]) -> Iterator[VectorSpec]:
    match mixer:
        case spec.Attention():
            yield from _qk_norms(prefix, mixer)
        case spec.LatentAttention():
            if mixer.q_rank is not None:
                yield VectorSpec(prefix + "attn.q_latent_norm", ((mixer.q_rank,),))
            yield VectorSpec(prefix + "attn.kv_latent_norm", ((mixer.kv_rank,),))
        case spec.DeltaNet():
            widths = {"q": mixer.key_width, "k": mixer.key_width, "v": mixer.value_width}
            yield from _conv_vectors(prefix + "delta.", widths, mixer.conv_kernel, has)
            for name, width in (("a_log", mixer.value_heads), ("dt_bias", mixer.decay_width)):
                yield VectorSpec(f"{prefix}delta.{name}", ((width,),), keeps_precision=True)
            yield VectorSpec(prefix + "delta.norm", ((mixer.value_dim,),))
        case spec.Mamba2():
            yield from _conv_vectors(
                prefix + "mamba.", {"x": mixer.conv_channels}, mixer.conv_kernel, has, bias=mixer.conv_bias
            )
            for name in ("a_log", "dt_bias", "d"):
                yield VectorSpec(f"{prefix}mamba.{name}", ((mixer.heads,),), keeps_precision=True)
            if mixer.norm is not None:
                yield VectorSpec(prefix + "mamba.norm", ((mixer.width,),))
        case spec.ShortConv():
            yield from _conv_vectors(prefix + "conv.", {"x": mixer.width}, mixer.conv_kernel, has, bias=mixer.bias)
        case spec.ParallelMixers():
            yield from _mixer_vectors(prefix, mixer.attention, has)
            yield from _mixer_vectors(prefix, mixer.recurrent, has)


def _qk_norms(prefix: str, attn: spec.Attention) -> Iterator[VectorSpec]:
    if attn.qk_norm is None:
        return
    for part, heads in (("q", attn.heads), ("k", attn.kv_heads)):
        shapes: tuple[tuple[int, ...], ...] = ((attn.head_dim,), (heads, attn.head_dim))
        if attn.qk_norm.scope == "all":
            shapes = ((heads * attn.head_dim,),)
        yield VectorSpec(f"{prefix}attn.{part}_norm", shapes, attn.qk_norm.norm.bias)


def _conv_vectors(
    role: str, widths: Mapping[str, int], kernel: int, has: Callable[[str], bool], *, bias: bool = False
) -> Iterator[VectorSpec]:
    """A causal convolution, stored as one tensor, or as one for each of several parts."""
    parts = {"conv": sum(widths.values())}
    if len(widths) > 1 and not has(role + "conv"):
        parts = {f"{part}_conv": width for part, width in widths.items()}
    for name, width in parts.items():
        yield VectorSpec(role + name, ((width, 1, kernel), (width, kernel)), bias, keeps_precision=True)


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
