"""The plan for a folder of safetensors: what lies alone is copied byte for byte, what is fused is cut.

Every tensor of a role gets the name the family's first choice gives it. Tensors of no role (a vision tower,
leftovers) are copied under the names they have, so nothing in the folder is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import Checkpoint, TensorInfo
from ..checkpoint.header import DTYPES
from ..checkpoint.lookup import FLOATS, key_at
from ..checkpoint.packed import EXL2, GPTQ
from ..checkpoint.reader import FORMS
from ..errors import Unsupported
from ..formats import PackedWeight, Weight, exl2, gptq
from ..formats.awq import COLUMNS
from ..formats.bits import WORD, unpack_across
from ..formats.gptq_config import GptqConfig
from ..spec.tensor_names import RowRange, TensorLocation
from ..spec.weight_roles import Matrix
from .plan import (
    CPU,
    ConversionPlanner,
    ConversionStep,
    NamedTensors,
    TensorAction,
    VectorSpec,
    dense_tensors,
)

TENSOR_SUFFIXES: dict[str, tuple[str, ...]] = {
    "dense": ("weight",),
    "exl2": (*EXL2, "q_perm"),
    **dict.fromkeys(("gptq", "gptq_v2", "awq"), GPTQ),
}
"""The tensors of one matrix by its form; any of them may have a bias too."""

SUFFIXES = tuple(form.suffix for form in FORMS)

TensorsBySuffix = dict[str, TensorInfo]  # by suffix


class FolderPlanner(ConversionPlanner):
    """Plans the conversion of a model folder."""

    def __init__(
        self, checkpoint: Checkpoint, model: spec.Model, to: str, quantization: GptqConfig | None
    ) -> None:
        super().__init__(model, to)
        self.checkpoint = checkpoint
        self.files = checkpoint.files
        self.names_by_key = {model.names.to_llama_key(name): name for name in self.files.names()}
        self.used_names: set[str] = set()
        self.reencoded: list[tuple[str, TensorLocation]] = []  # matrices that get tensors of another form
        self.quantization = quantization or GptqConfig()
        layout = self.quantization.checkpoint_format
        self.form_by_suffix = {
            **{form.suffix: form.words for form in FORMS},
            "weight": "dense",
            "qweight": "awq" if layout == "gemm" else layout,
        }

    def has(self, role: str) -> bool:
        """Whether the files hold this role."""
        return self.checkpoint.has(role)

    def plan_matrix(self, m: Matrix) -> ConversionStep:
        """Copied, cut, written in the other layout or unpacked."""
        stored, place = self._source_place(m.role), self.target_place(m.role)
        self.checkpoint.check(m.role)
        form = self.form_by_suffix[next(s for s in SUFFIXES if key_at(stored, s) in self.names_by_key)]
        action = self.choose_action(m.role, form)
        parts = self._take_tensors(stored, form)
        if form == "dense":
            self._check_floats(m, stored, parts)
        if action != "keep":
            self.reencoded.append((m.role, place))
        transposes = form == "dense" and stored.transposed != place.transposed
        if action == "keep" and _is_whole_tensor(stored) and not transposes:
            return self._copy_step(m.role, {info.name: key_at(place, s) for s, info in parts.items()})
        if action == "keep" and form == "awq":
            return self._slice_awq_step(m, stored, place, parts)
        step = self._encode_step(m, place, parts, form, action)
        if (
            action != "unpack"
            and form != "dense"
            and (form == "exl2" or not self._surely_fits_gptq(m, form, parts))
        ):
            _check_encodable(step)
        return step

    def plan_vector(self, v: VectorSpec) -> ConversionStep:
        """Copied."""
        stored, place = self._source_place(v.role), self.target_place(v.role)
        if not _is_whole_tensor(stored):
            raise Unsupported(f"{v.role} is a part of {stored.key}, which cannot be cut here.")
        parts = self._take_tensors(stored, "dense")
        return self._copy_step(v.role, {info.name: key_at(place, suffix) for suffix, info in parts.items()})

    def plan_unassigned(self) -> Iterable[ConversionStep]:
        """Copied under the names they have."""
        for role, place in self.reencoded:
            for suffix in SUFFIXES:
                name = self.names_by_key.get(key_at(place, suffix))
                if name is not None and name not in self.used_names:
                    raise Unsupported(
                        f"{role} is stored twice, and {self.files.info(name)} would hide what is converted: "
                        "remove one of the two."
                    )
        for name in self.files.names():
            if name in self.used_names:
                continue
            info = self.files.info(name)
            if info.dtype not in DTYPES:
                raise Unsupported(f"{info}: the type {info.dtype} cannot be written.")
            yield self._copy_step(name, {name: name})

    def _source_place(self, role: str) -> TensorLocation:
        self.checkpoint.describe(role)  # says what is missing
        place = self.checkpoint.stored(role)
        assert place is not None
        return place

    def _take_tensors(self, place: TensorLocation, form: str) -> TensorsBySuffix:
        """The tensors at a place that belong to a matrix of this form."""
        keys = {suffix: key_at(place, suffix) for suffix in (*TENSOR_SUFFIXES[form], "bias")}
        parts = {
            s: self.files.info(self.names_by_key[key]) for s, key in keys.items() if key in self.names_by_key
        }
        self.used_names |= {info.name for info in parts.values()}
        return parts

    def _check_floats(self, m: Matrix, stored: TensorLocation, parts: TensorsBySuffix) -> None:
        """Have the reader say what is wrong with a tensor that is not what the description makes it."""
        info = parts["weight"]
        shape = (m.in_features, m.out_features) if stored.transposed else (m.out_features, m.in_features)
        if info.dtype not in FLOATS or (_is_whole_tensor(stored) and info.shape != shape):
            self._read_weight(m)

    def _copy_step(self, label: str, names: dict[str, str]) -> ConversionStep:
        """Stored name → new name, bytes untouched."""

        def make() -> NamedTensors:
            for stored, new in names.items():
                yield new, self._read_copy(stored)

        nbytes = sum(self.files.info(name).nbytes for name in names)
        return ConversionStep(label, tuple(names.values()), nbytes, make)

    def _read_copy(self, name: str, column_ranges: Sequence[RowRange] = (), unit: int = 1) -> Tensor:
        """A stored tensor in memory of its own, or some of its columns, `unit` of them in each stored one."""
        view = self.files.read(name)
        pieces = [view[..., start // unit : stop // unit] for start, stop in column_ranges]
        owned = torch.cat(pieces, -1) if pieces else view.clone()
        self.files.release(name)
        return owned

    def _slice_awq_step(
        self, m: Matrix, stored: TensorLocation, place: TensorLocation, parts: TensorsBySuffix
    ) -> ConversionStep:
        """Columns of an AWQ matrix, eight of which share a word."""
        units = {"qweight": len(COLUMNS), "qzeros": len(COLUMNS), "scales": 1, "bias": 1}
        if any(edge % len(COLUMNS) for span in stored.rows for edge in span):
            raise Unsupported(
                f"{m.role} is a part of {stored.key} that does not begin and end at a multiple of "
                f'{len(COLUMNS)} columns, as AWQ\'s words do. Convert to "gptq-v2" or "dense".'
            )
        names = {key_at(place, suffix): suffix for suffix in units if suffix in parts}

        def make() -> NamedTensors:
            for name, suffix in names.items():
                yield name, self._read_copy(parts[suffix].name, stored.rows, units[suffix])

        return ConversionStep(m.role, tuple(names), _estimated_bytes(m, parts), make)

    def _encode_step(
        self, m: Matrix, place: TensorLocation, parts: TensorsBySuffix, form: str, action: TensorAction
    ) -> ConversionStep:
        """A matrix that is read, and written in the form it is to have."""
        nbytes = _estimated_bytes(m, parts) + 4 * m.in_features
        writer: Callable[[Weight], dict[str, Tensor]] = partial(dense_tensors, place=place)
        suffixes = TENSOR_SUFFIXES["dense"]
        if action == "unpack":
            nbytes = 2 * m.out_features * m.in_features + 4 * m.out_features
        elif form == "exl2":
            writer, suffixes = _write_exl2, EXL2
        elif form != "dense":
            writer, suffixes = partial(_write_gptq, v2=self._writes_gptq_v2(form)), GPTQ

        def make() -> NamedTensors:
            for suffix, tensor in writer(self._read_weight(m)).items():
                yield key_at(place, suffix), tensor

        suffixes += ("bias",) if m.bias else ()
        return ConversionStep(m.role, tuple(key_at(place, suffix) for suffix in suffixes), nbytes, make)

    def _read_weight(self, m: Matrix) -> Weight:
        return self.checkpoint.weight(
            m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU
        )

    def _writes_gptq_v2(self, form: str) -> bool:
        """Whether zero points are written as they are."""
        return self.to == "gptq-v2" or (self.to == "safetensors" and form == "gptq_v2")

    def _surely_fits_gptq(self, m: Matrix, form: str, parts: TensorsBySuffix) -> bool:
        """Whether headers and zero points alone tell that GPTQ can say this matrix; if not, it is tried."""
        if not {"qweight", "qzeros", "scales"} <= parts.keys() or self.quantization.borrows:
            return False
        bits = 4 if form == "awq" else parts["qweight"].shape[0] * WORD // m.in_features
        zeros = self.files.read(parts["qzeros"].name)
        width = parts["scales"].shape[-1]
        if (
            zeros.shape[-1] * WORD != width * bits
            or m.in_features * bits % WORD
            or m.out_features * bits % WORD
        ):
            return False
        low, high = (int(edge) + (form == "gptq") for edge in unpack_across(zeros, bits, width).aminmax())
        self.files.release(parts["qzeros"].name)
        return high < 1 << bits if self._writes_gptq_v2(form) else low >= 1 and high <= 1 << bits


def _is_whole_tensor(place: TensorLocation) -> bool:
    return not place.rows and place.expert_rows is None


def _estimated_bytes(m: Matrix, parts: TensorsBySuffix) -> int:
    """About the bytes of a matrix that is a part of what is stored."""
    total = sum(info.nbytes for info in parts.values())
    if "weight" in parts:
        size = torch.Size(parts["weight"].shape).numel()
        return total * m.in_features * m.out_features // max(1, size)
    main = parts.get("scales") or parts.get("q_weight")
    stored = main.shape[-1] if main is not None and main.shape else m.out_features
    padded = -(-m.out_features // exl2.ALIGN) * exl2.ALIGN
    return total * padded // max(1, stored)


def _write_exl2(weight: Weight) -> dict[str, Tensor]:
    assert isinstance(weight, PackedWeight)
    return exl2.write(weight)


def _write_gptq(weight: Weight, *, v2: bool) -> dict[str, Tensor]:
    assert isinstance(weight, PackedWeight)
    return gptq.write(weight, v2=v2)


def _check_encodable(step: ConversionStep) -> None:
    """Make a matrix for nothing, to hear now and not halfway whether it can be made."""
    try:
        for _ in step.make_tensors():
            pass
    except Unsupported as error:
        raise Unsupported(f'{step.label}: {error} Convert to "dense", which keeps its numbers.') from error
