"""The planners for the two containers: `FolderPlanner` for safetensors, `GgufPlanner` for a GGUF file.

Both give each role's tensors the name of the family's first location that holds the role alone. From a folder, a
matrix with tensors of its own is copied byte for byte and one in a fused tensor is sliced out; tensors of no role (a
vision tower, leftovers) are copied under their own names. A GGUF file is read by role, with its converter's changes
undone: floats are kept, quantised matrices can only be unpacked, and a tensor of no role is refused, since it has no
name outside GGUF.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import GgufCheckpoint, SafetensorsCheckpoint, TensorInfo, WeightSource
from ..checkpoint.gguf_file import ROPE_FACTOR_TENSORS
from ..checkpoint.safetensors_files import DTYPES, FLOAT_TYPES
from ..config import FrozenConfig
from ..errors import Unsupported
from ..formats import FORMATS, Weight, exl2, gptq
from ..formats.awq import NIBBLE_COLUMNS
from ..formats.packed import WORD_BITS, unpack_rows
from ..formats.quantization_config import QuantizationConfig
from ..spec.model import Matrix
from ..spec.tensor_names import RowRange, TensorLocation
from .plan import (
    CPU,
    KEPT_FORMATS,
    ConversionPlan,
    ConversionPlanner,
    ConversionStep,
    NamedTensors,
    TensorAction,
    VectorSpec,
    dense_tensors,
)

TENSOR_SUFFIXES: dict[str, tuple[str, ...]] = {
    "dense": ("weight",),
    "exl2": (*exl2.TENSORS, "q_perm"),
    **dict.fromkeys(("gptq", "gptq_v2", "awq"), gptq.TENSORS),
}
"""By format, the suffixes of a matrix's tensors; any matrix may also have a bias."""

MARKERS = tuple(dict.fromkeys(one.marker for one in FORMATS))
"""The suffixes by which a matrix is found, the preferred first."""

TensorsBySuffix = dict[str, TensorInfo]


class FolderPlanner(ConversionPlanner):
    """Plans the conversion of a model folder."""

    def __init__(
        self,
        checkpoint: SafetensorsCheckpoint,
        model: spec.Model,
        to: str,
        quantization: QuantizationConfig | None,
        separate: Set[str] = frozenset(),
    ) -> None:
        super().__init__(checkpoint, model, to, separate)
        self.checkpoint = checkpoint
        self.files = checkpoint.files
        self.names_by_key = checkpoint.names_by_key
        self.used_names: set[str] = set()
        self.reencoded: list[tuple[str, TensorLocation]] = []  # matrices that are not kept, and where they go
        self.quantization = quantization or QuantizationConfig()
        layout = self.quantization.checkpoint_format
        self.format_by_suffix = {
            **{one.marker: one.name for one in FORMATS},
            "weight": "dense",
            "qweight": "awq" if layout == "gemm" else layout,
        }

    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """Copy, slice, rewrite or unpack a matrix."""
        stored, location = self._source_location(m.role), self.target_location(m.role)
        self.checkpoint.refuse_scaled_inputs(m.role)
        fmt = self._format_at(stored)
        action = self.choose_action(m.role, fmt)
        parts = self._take_tensors(stored, fmt)
        if fmt == "dense":
            self._check_floats(m, stored, parts)
        if action != "keep":
            self.reencoded.append((m.role, location))
        transposes = fmt == "dense" and stored.transposed != location.transposed
        if action == "keep" and stored.is_whole and not transposes:
            return self._copy_step(m.role, {info.name: location.tensor_key(s) for s, info in parts.items()})
        if action == "keep" and fmt == "awq":
            return self._slice_awq_step(m, stored, location, parts)
        step = self._encode_step(m, location, parts, fmt, action)
        if action != "unpack" and fmt != "dense" and (fmt == "exl2" or not self._surely_fits_gptq(m, fmt, parts)):
            _check_encodable(step)
        return step

    def plan_fused(self, group: Sequence[Matrix]) -> list[ConversionStep]:
        """One step that copies the fused tensors, if they hold these matrices and are kept."""
        stored, fused = self._source_location(group[0].role), self._fused_location(group[0].role)
        fmt = self._format_at(stored)
        if {self._source_location(m.role).key for m in group} != {fused.key} or fmt not in KEPT_FORMATS[self.to]:
            return super().plan_fused(group)
        for m in group:
            self.choose_action(m.role, fmt)
        parts = self._take_tensors(stored, fmt)
        if fmt == "dense":
            whole = group[0]._replace(out_features=sum(m.out_features for m in group))
            if self._has_wrong_form(whole, stored, parts):
                for m in group:
                    self._read_weight(m)
        return [self._copy_step(group[0].role, {info.name: fused.tensor_key(s) for s, info in parts.items()})]

    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        stored, location = self._source_location(v.role), self.target_location(v.role)
        if not stored.is_whole:
            raise Unsupported(f"{v.role} is a part of {stored.key}, from which it cannot be sliced.")
        parts = self._take_tensors(stored, "dense")
        return self._copy_step(v.role, {info.name: location.tensor_key(suffix) for suffix, info in parts.items()})

    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """Copy the tensors of no role under their own names."""
        for role, location in self.reencoded:
            for suffix in MARKERS:
                name = self.names_by_key.get(location.tensor_key(suffix))
                if name is not None and name not in self.used_names:
                    raise Unsupported(
                        f"{role} is stored twice, and a reader of the new model would take "
                        f"{self.files.info(name)} for it: remove one of the two."
                    )
        for name in self.files.tensors:
            if name in self.used_names:
                continue
            info = self.files.info(name)
            if info.dtype not in DTYPES:
                raise Unsupported(f"{info}: the type {info.dtype} cannot be written.")
            yield self._copy_step(name, {name: name})

    def _source_location(self, role: str) -> TensorLocation:
        self.checkpoint.describe(role)  # raises if tensors are missing
        location = self.checkpoint.find(role)
        assert location is not None
        return location

    def _take_tensors(self, location: TensorLocation, fmt: str) -> TensorsBySuffix:
        """The tensors at a location that belong to a matrix of this format."""
        keys = {suffix: location.tensor_key(suffix) for suffix in (*TENSOR_SUFFIXES[fmt], "bias")}
        parts = {s: self.files.info(self.names_by_key[key]) for s, key in keys.items() if key in self.names_by_key}
        self.used_names |= {info.name for info in parts.values()}
        return parts

    def _check_floats(self, m: Matrix, stored: TensorLocation, parts: TensorsBySuffix) -> None:
        """Read a tensor whose dtype or shape is not the spec's, because the reader raises the right error."""
        if parts["weight"].dtype not in FLOAT_TYPES or (stored.is_whole and self._has_wrong_form(m, stored, parts)):
            self._read_weight(m)

    def _has_wrong_form(self, m: Matrix, stored: TensorLocation, parts: TensorsBySuffix) -> bool:
        """Whether the dtype or the shape of a tensor that holds a matrix, or stacked ones, is not the spec's."""
        shape = (m.in_features, m.out_features) if stored.transposed else (m.out_features, m.in_features)
        found = parts["weight"].shape
        if stored.rows_per_expert and len(found) == 3:
            found = (found[0] * found[1], found[2])
        return parts["weight"].dtype not in FLOAT_TYPES or found != shape

    def _format_at(self, location: TensorLocation) -> str:
        return self.format_by_suffix[next(s for s in MARKERS if location.tensor_key(s) in self.names_by_key)]

    def _copy_step(self, label: str, names: dict[str, str]) -> ConversionStep:
        """A step that copies tensors byte for byte; `names` maps stored names to new ones."""

        def make() -> NamedTensors:
            for stored, new in names.items():
                yield new, self._read_copy(stored)

        nbytes = sum(self.files.info(name).nbytes for name in names)
        return ConversionStep(label, tuple(names.values()), nbytes, make)

    def _read_copy(self, name: str, column_ranges: Sequence[RowRange] = (), unit: int = 1) -> Tensor:
        """A copy of a stored tensor, or of some columns of its matrix; each stored element holds `unit` columns."""
        view = self.files.view(name)
        pieces = [view[..., start // unit : stop // unit] for start, stop in column_ranges]
        owned = torch.cat(pieces, -1) if pieces else view.clone()
        self.files.release(name)
        return owned

    def _slice_awq_step(
        self, m: Matrix, stored: TensorLocation, location: TensorLocation, parts: TensorsBySuffix
    ) -> ConversionStep:
        """A step that slices columns out of an AWQ matrix, whose words hold eight columns each."""
        units = {"qweight": len(NIBBLE_COLUMNS), "qzeros": len(NIBBLE_COLUMNS), "scales": 1, "bias": 1}
        if any(edge % len(NIBBLE_COLUMNS) for span in stored.rows for edge in span):
            raise Unsupported(
                f"{m.role} is a part of {stored.key} that does not begin and end at a multiple of "
                f'{len(NIBBLE_COLUMNS)} columns, as an AWQ word does. Convert to "gptq-v2" or "dense".'
            )
        names = {location.tensor_key(suffix): suffix for suffix in units if suffix in parts}

        def make() -> NamedTensors:
            for name, suffix in names.items():
                yield name, self._read_copy(parts[suffix].name, stored.rows, units[suffix])

        return ConversionStep(m.role, tuple(names), _estimated_bytes(m, parts), make)

    def _encode_step(
        self, m: Matrix, location: TensorLocation, parts: TensorsBySuffix, fmt: str, action: TensorAction
    ) -> ConversionStep:
        """A step that reads a matrix and writes it in its new format."""
        nbytes = _estimated_bytes(m, parts) + 4 * m.in_features
        write: Callable[[Any], dict[str, Tensor]] = partial(dense_tensors, location=location)
        suffixes = TENSOR_SUFFIXES["dense"]
        if action == "unpack":
            nbytes = 2 * m.out_features * m.in_features + 4 * m.out_features
        elif fmt == "exl2":
            write, suffixes = exl2.write, exl2.TENSORS
        elif fmt != "dense":
            write, suffixes = partial(gptq.write, v2=self._writes_gptq_v2(fmt)), gptq.TENSORS

        def make() -> NamedTensors:
            for suffix, tensor in write(self._read_weight(m)).items():
                yield location.tensor_key(suffix), tensor

        suffixes += ("bias",) if m.bias else ()
        return ConversionStep(m.role, tuple(location.tensor_key(suffix) for suffix in suffixes), nbytes, make)

    def _read_weight(self, m: Matrix) -> Weight:
        return self.checkpoint.weight(m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU)

    def _writes_gptq_v2(self, fmt: str) -> bool:
        """Whether zero points are written without GPTQ's offset of one (its version 2)."""
        return self.to == "gptq-v2" or (self.to == "safetensors" and fmt == "gptq_v2")

    def _surely_fits_gptq(self, m: Matrix, fmt: str, parts: TensorsBySuffix) -> bool:
        """Whether headers and zero points alone prove that GPTQ can encode this matrix exactly."""
        if not {"qweight", "qzeros", "scales"} <= parts.keys() or self.quantization.zeros_decremented_per_word:
            return False
        bits = 4 if fmt == "awq" else parts["qweight"].shape[0] * WORD_BITS // m.in_features
        zeros = self.files.view(parts["qzeros"].name)
        width = parts["scales"].shape[-1]
        if (
            zeros.shape[-1] * WORD_BITS != width * bits
            or m.in_features * bits % WORD_BITS
            or m.out_features * bits % WORD_BITS
        ):
            return False
        low, high = (int(edge) + (fmt == "gptq") for edge in unpack_rows(zeros, bits, width).aminmax())
        self.files.release(parts["qzeros"].name)
        return high < 1 << bits if self._writes_gptq_v2(fmt) else low >= 1 and high <= 1 << bits


def _estimated_bytes(m: Matrix, parts: TensorsBySuffix) -> int:
    """The approximate bytes of a matrix, in proportion if the stored tensors hold others too."""
    total = sum(info.nbytes for info in parts.values())
    if "weight" in parts:
        size = torch.Size(parts["weight"].shape).numel()
        return total * m.in_features * m.out_features // max(1, size)
    main = parts.get("scales") or parts.get("q_weight")
    stored = main.shape[-1] if main is not None and main.shape else m.out_features
    padded = -(-m.out_features // exl2.ALIGNMENT) * exl2.ALIGNMENT
    return total * padded // max(1, stored)


def _check_encodable(step: ConversionStep) -> None:
    """Encode a matrix and drop the result, so that the plan fails and not the conversion half way."""
    try:
        for _ in step.make_tensors():
            pass
    except Unsupported as error:
        raise Unsupported(f'{step.label}: {error} Convert to "dense", which keeps its numbers.') from error


class GgufPlanner(ConversionPlanner):
    """Plans the conversion of a GGUF file."""

    def __init__(
        self, checkpoint: GgufCheckpoint, model: spec.Model, to: str, separate: Set[str] = frozenset()
    ) -> None:
        super().__init__(checkpoint, model, to, separate)
        self.checkpoint = checkpoint
        self.used_names = set(ROPE_FACTOR_TENSORS)  # their numbers are in config.json

    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """Keep floats; unpack quantised blocks to float32."""
        description, nbytes = self.checkpoint.describe(m.role)
        fmt = "dense" if description.startswith("dense ") else description
        if self.choose_action(m.role, fmt) == "unpack":
            nbytes = 4 * m.out_features * (m.in_features + m.bias)
        self._mark_used(m.role)
        location = self.target_location(m.role)
        names = [location.tensor_key(suffix) for suffix in ("weight", "bias")[: 1 + m.bias]]

        def make() -> NamedTensors:
            weight = self.checkpoint.weight(m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU)
            for suffix, tensor in dense_tensors(weight, location).items():
                yield location.tensor_key(suffix), tensor

        return ConversionStep(m.role, tuple(names), nbytes, make)

    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        """Write a vector in float32, GGUF's usual type, which holds every other exactly."""
        self.checkpoint.describe(v.role)
        self._mark_used(v.role)
        location = self.target_location(v.role)
        names = {location.tensor_key(suffix): suffix for suffix in ("weight", "bias")[: 1 + v.bias]}
        size = 4 * sum(max(torch.Size(shape).numel() for shape in v.shapes_of(suffix)) for suffix in names.values())

        def make() -> NamedTensors:
            for name, suffix in names.items():
                shapes = v.shapes_of(suffix)
                yield name, self.checkpoint.tensor(v.role, shapes, dtype=torch.float32, device=CPU, suffix=suffix)

        return ConversionStep(v.role, tuple(names), size, make)

    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """No steps; `Unsupported` if there is a tensor of no role, which would be lost."""
        unassigned = [name for name in self.checkpoint.files.tensors if name not in self.used_names]
        if unassigned:
            others = f" and {len(unassigned) - 1} more" if unassigned[1:] else ""
            raise Unsupported(
                f"{self.checkpoint.files.info(unassigned[0])}{others}: no part of this model uses it, and "
                "it has no name outside GGUF: it would be lost."
            )
        return ()

    def _mark_used(self, role: str) -> None:
        stored = self.checkpoint.find(role)
        assert stored is not None
        self.used_names |= {stored.tensor_key("weight"), stored.tensor_key("bias")}


def make_plan(
    config: FrozenConfig, checkpoint: WeightSource, to: str, separate: Set[str] = frozenset()
) -> ConversionPlan:
    """The plan for a model's files, whichever container they are; the caller replaces the `separate` roles."""
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufPlanner(checkpoint, config.spec, to, separate).plan()
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    return FolderPlanner(checkpoint, config.spec, to, config.quantization, separate).plan()
