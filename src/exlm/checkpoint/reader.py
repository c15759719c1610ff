"""The weights of a model by role, whatever its files call them and however they store them.

Every shape is checked against what the model's description expects, and what is returned shares no memory
with the files. A new way to store a matrix is one line in `FORMS`. What to do with a matrix is not decided
here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from ..errors import Unsupported
from ..formats import Weight
from ..formats.gptq_config import GptqConfig
from ..spec.tensor_names import TensorLocation, TensorNames
from .dense import copy, read_dense
from .packed import read_exl2, read_gptq
from .safetensors_folder import SafetensorsFolder
from .safetensors_header import DTYPES
from .safetensors_index import flatten_experts
from .tensor_index import TensorIndex, WeightRequest, key_at, num_rows
from .words import exl2_words, gptq_words

Shape = tuple[int, ...]


class Form(NamedTuple):
    """One way to store a matrix: the suffix that gives it away, its name, and its reader."""

    suffix: str
    words: str
    read: Callable[[TensorIndex, WeightRequest], Weight]
    tell: Callable[[TensorIndex, TensorLocation], str] | None = None  # more words, for people


def _unread(suffix: str, words: str) -> Form:
    def refuse(lookup: TensorIndex, wanted: WeightRequest) -> NoReturn:
        info = lookup.info(key_at(wanted.location, suffix))
        raise Unsupported(f"{info}: {wanted.role} is stored as {words}, which this version cannot read.")

    return Form(suffix, words, refuse)


FORMS: tuple[Form, ...] = (
    Form("q_weight", "exl2", read_exl2, exl2_words),
    Form("qweight", "gptq or awq", read_gptq, gptq_words),
    _unread("trellis", "EXL3"),
    _unread("weight_packed", "compressed-tensors"),
    Form("weight", "dense", read_dense),
)

_BY_SUFFIX = {form.suffix: form for form in FORMS}


class SafetensorsCheckpoint:
    """The weights of one model, by role."""

    def __init__(
        self, files: SafetensorsFolder, names: TensorNames, quantization: GptqConfig | None = None
    ) -> None:
        self.files = files
        self.names = names
        self._lookup = TensorIndex(files, names, quantization)

    @classmethod
    def open(
        cls, folder: Path, names: TensorNames, quantization: GptqConfig | None = None
    ) -> SafetensorsCheckpoint:
        """The checkpoint in a model folder; only headers are read.

        `quantization` is what the JSON beside the weights says of GPTQ or AWQ tensors.
        """
        return cls(SafetensorsFolder(folder), names, quantization)

    def has(self, role: str) -> bool:
        """Whether the files hold this role, in whatever form."""
        return self.stored(role) is not None

    def stored(self, role: str) -> TensorLocation | None:
        """The place where the files hold this role."""
        found = self._lookup.find(role, tuple(_BY_SUFFIX))
        return found and found[0]

    def check(self, role: str) -> None:
        """`Unsupported` if the matrix that the files hold means more than can be computed here."""
        if place := self.stored(role):
            self._lookup.check_unscaled(role, place)

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, bias included, from headers alone."""
        place, form = self._find(role, fallback)
        if form.suffix != "weight":
            words = form.tell(self._lookup, place) if form.tell else form.words
            return words, sum(info.nbytes for info in self._lookup.tensors_at(place))
        info = self._lookup.info(key_at(place, "weight"))
        total = info.nbytes
        if place.expert_rows:
            total = total * place.rows_per_expert // max((1, *flatten_experts(info).shape[:1]))
        if f"{place.key}.bias" in self._lookup:
            total += self._lookup.info(f"{place.key}.bias").nbytes
        if place.rows:
            total = total * num_rows(place.rows) // self._lookup.stored_outputs(role, place, 0)
        return f"{form.words} {str(DTYPES.get(info.dtype, info.dtype)).removeprefix('torch.')}", total

    def unused(self) -> list[str]:
        """Stored names that nobody has asked for so far."""
        return self._lookup.unused()

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> torch.Tensor:
        """A float tensor that is no matrix to multiply with: a norm, an embedding, or a norm's bias.

        `shape` is the only one accepted or several of them; with `finite`, NaN or infinity in it is an error.
        """
        place = self._place(role, suffix)
        info = self._lookup.use_floats(key_at(place, suffix))
        spans = place.rows or ((0, info.shape[0] if info.shape else 1),)
        found = (num_rows(spans), *info.shape[1:]) if info.shape else ()
        shapes = _alternatives(shape)
        if found not in shapes or any(stop > info.shape[0] for _, stop in place.rows):
            raise self._lookup.wrong_shape(info, role, " or ".join(str(list(one)) for one in shapes))
        return copy(self._lookup, info, spans, found, dtype, device, finite=finite)

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """A matrix to multiply with, in whatever form; dense numbers in `dtype`, None: as stored.

        `fallback` is the role it is tied to, taken where the files do not hold `role` itself.
        """
        place, form = self._find(role, fallback)
        self._lookup.check_unscaled(role, place)
        places = self.names.locations_of(role)
        own = () if place in places else tuple(f"{one.key}.bias" for one in places)
        return form.read(
            self._lookup, WeightRequest(role, place, in_features, out_features, bias, dtype, device, own)
        )

    def _find(self, role: str, fallback: str | None) -> tuple[TensorLocation, Form]:
        roles = (role,) if fallback is None else (role, fallback)
        for one in roles:
            if found := self._lookup.find(one, tuple(_BY_SUFFIX)):
                return found[0], _BY_SUFFIX[found[1]]
        keys = [key_at(place, "weight") for one in roles for place in self.names.locations_of(one)]
        raise self._lookup.missing(role, keys)

    def _place(self, role: str, suffix: str) -> TensorLocation:
        if found := self._lookup.find(role, (suffix,)):
            return found[0]
        if suffix == "weight":
            place, form = self._find(role, None)
            raise Unsupported(
                f"{self._lookup.info(key_at(place, form.suffix))}: {role} is stored as {form.words}; "
                "expected plain floats."
            )
        raise self._lookup.missing(
            f"the {suffix} of {role}", [key_at(place, suffix) for place in self.names.locations_of(role)]
        )


def _alternatives(shape: Shape | tuple[Shape, ...]) -> tuple[Shape, ...]:
    several = tuple(one for one in shape if isinstance(one, tuple))
    return several or (tuple(size for size in shape if isinstance(size, int)),)
