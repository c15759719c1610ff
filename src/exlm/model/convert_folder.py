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
from ..spec.names import Place, Span
from ..spec.roles import Matrix
from .convert_plan import CPU, Fate, Named, Planner, Step, Vector, dense_tensors

TENSORS: dict[str, tuple[str, ...]] = {
    "dense": ("weight",),
    "exl2": (*EXL2, "q_perm"),
    **dict.fromkeys(("gptq", "gptq_v2", "awq"), GPTQ),
}
"""The tensors of one matrix by its form; any of them may have a bias too."""

SUFFIXES = tuple(form.suffix for form in FORMS)

Parts = dict[str, TensorInfo]  # by suffix


class FolderPlanner(Planner):
    """Plans the conversion of a model folder."""

    def __init__(
        self, checkpoint: Checkpoint, model: spec.Model, to: str, quantization: GptqConfig | None
    ) -> None:
        super().__init__(model, to)
        self.checkpoint = checkpoint
        self.files = checkpoint.files
        self.stored = {model.names.canonical(name): name for name in self.files.names()}
        self.claimed: set[str] = set()
        self.changed: list[tuple[str, Place]] = []  # matrices that get tensors of another form
        self.quantization = quantization or GptqConfig()
        layout = self.quantization.checkpoint_format
        self.forms = {
            **{form.suffix: form.words for form in FORMS},
            "weight": "dense",
            "qweight": "awq" if layout == "gemm" else layout,
        }

    def has(self, role: str) -> bool:
        """Whether the files hold this role."""
        return self.checkpoint.has(role)

    def matrix(self, m: Matrix) -> Step:
        """Copied, cut, written in the other layout or unpacked."""
        stored, place = self._stored(m.role), self.first(m.role)
        self.checkpoint.check(m.role)
        form = self.forms[next(s for s in SUFFIXES if key_at(stored, s) in self.stored)]
        fate = self.decide(m.role, form)
        parts = self._claim(stored, form)
        if form == "dense":
            self._check_floats(m, stored, parts)
        if fate != "keep":
            self.changed.append((m.role, place))
        turned = form == "dense" and stored.transposed != place.transposed
        if fate == "keep" and _whole(stored) and not turned:
            return self._copy(m.role, {info.name: key_at(place, s) for s, info in parts.items()})
        if fate == "keep" and form == "awq":
            return self._cut_awq(m, stored, place, parts)
        step = self._written(m, place, parts, form, fate)
        if fate != "unpack" and form != "dense" and (form == "exl2" or not self._surely(m, form, parts)):
            _try(step)
        return step

    def vector(self, v: Vector) -> Step:
        """Copied."""
        stored, place = self._stored(v.role), self.first(v.role)
        if not _whole(stored):
            raise Unsupported(f"{v.role} is a part of {stored.key}, which cannot be cut here.")
        parts = self._claim(stored, "dense")
        return self._copy(v.role, {info.name: key_at(place, suffix) for suffix, info in parts.items()})

    def rest(self) -> Iterable[Step]:
        """Copied under the names they have."""
        for role, place in self.changed:
            for suffix in SUFFIXES:
                name = self.stored.get(key_at(place, suffix))
                if name is not None and name not in self.claimed:
                    raise Unsupported(
                        f"{role} is stored twice, and {self.files.info(name)} would hide what is converted: "
                        "remove one of the two."
                    )
        for name in self.files.names():
            if name in self.claimed:
                continue
            info = self.files.info(name)
            if info.dtype not in DTYPES:
                raise Unsupported(f"{info}: the type {info.dtype} cannot be written.")
            yield self._copy(name, {name: name})

    def _stored(self, role: str) -> Place:
        self.checkpoint.describe(role)  # says what is missing
        place = self.checkpoint.stored(role)
        assert place is not None
        return place

    def _claim(self, place: Place, form: str) -> Parts:
        """The tensors at a place that belong to a matrix of this form."""
        keys = {suffix: key_at(place, suffix) for suffix in (*TENSORS[form], "bias")}
        parts = {s: self.files.info(self.stored[key]) for s, key in keys.items() if key in self.stored}
        self.claimed |= {info.name for info in parts.values()}
        return parts

    def _check_floats(self, m: Matrix, stored: Place, parts: Parts) -> None:
        """Have the reader say what is wrong with a tensor that is not what the description makes it."""
        info = parts["weight"]
        shape = (m.in_features, m.out_features) if stored.transposed else (m.out_features, m.in_features)
        if info.dtype not in FLOATS or (_whole(stored) and info.shape != shape):
            self._weight(m)

    def _copy(self, what: str, names: dict[str, str]) -> Step:
        """Stored name → new name, bytes untouched."""

        def make() -> Named:
            for stored, new in names.items():
                yield new, self._own(stored)

        nbytes = sum(self.files.info(name).nbytes for name in names)
        return Step(what, tuple(names.values()), nbytes, make)

    def _own(self, name: str, spans: Sequence[Span] = (), unit: int = 1) -> Tensor:
        """A stored tensor in memory of its own, or some of its columns, `unit` of them in each stored one."""
        view = self.files.read(name)
        pieces = [view[..., start // unit : stop // unit] for start, stop in spans]
        owned = torch.cat(pieces, -1) if pieces else view.clone()
        self.files.release(name)
        return owned

    def _cut_awq(self, m: Matrix, stored: Place, place: Place, parts: Parts) -> Step:
        """Columns of an AWQ matrix, eight of which share a word."""
        units = {"qweight": len(COLUMNS), "qzeros": len(COLUMNS), "scales": 1, "bias": 1}
        if any(edge % len(COLUMNS) for span in stored.rows for edge in span):
            raise Unsupported(
                f"{m.role} is a part of {stored.key} that does not begin and end at a multiple of "
                f'{len(COLUMNS)} columns, as AWQ\'s words do. Convert to "gptq-v2" or "dense".'
            )
        names = {key_at(place, suffix): suffix for suffix in units if suffix in parts}

        def make() -> Named:
            for name, suffix in names.items():
                yield name, self._own(parts[suffix].name, stored.rows, units[suffix])

        return Step(m.role, tuple(names), _share(m, parts), make)

    def _written(self, m: Matrix, place: Place, parts: Parts, form: str, fate: Fate) -> Step:
        """A matrix that is read, and written in the form it is to have."""
        nbytes = _share(m, parts) + 4 * m.in_features
        writer: Callable[[Weight], dict[str, Tensor]] = partial(dense_tensors, place=place)
        suffixes = TENSORS["dense"]
        if fate == "unpack":
            nbytes = 2 * m.out_features * m.in_features + 4 * m.out_features
        elif form == "exl2":
            writer, suffixes = _write_exl2, EXL2
        elif form != "dense":
            writer, suffixes = partial(_write_gptq, v2=self._v2(form)), GPTQ

        def make() -> Named:
            for suffix, tensor in writer(self._weight(m)).items():
                yield key_at(place, suffix), tensor

        suffixes += ("bias",) if m.bias else ()
        return Step(m.role, tuple(key_at(place, suffix) for suffix in suffixes), nbytes, make)

    def _weight(self, m: Matrix) -> Weight:
        return self.checkpoint.weight(
            m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU
        )

    def _v2(self, form: str) -> bool:
        """Whether zero points are written as they are."""
        return self.to == "gptq-v2" or (self.to == "safetensors" and form == "gptq_v2")

    def _surely(self, m: Matrix, form: str, parts: Parts) -> bool:
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
        return high < 1 << bits if self._v2(form) else low >= 1 and high <= 1 << bits


def _whole(place: Place) -> bool:
    return not place.rows and place.slab is None


def _share(m: Matrix, parts: Parts) -> int:
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


def _try(step: Step) -> None:
    """Make a matrix for nothing, to hear now and not halfway whether it can be made."""
    try:
        for _ in step.make():
            pass
    except Unsupported as error:
        raise Unsupported(f'{step.what}: {error} Convert to "dense", which keeps its numbers.') from error
