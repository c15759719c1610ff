"""Which stored tensor a role means: canonical keys, places tried in order, and what to say if none fits.

No tensor data is read here; how a matrix is put together from what is found is in one module for each form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from ..formats.gptq_config import GptqConfig
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .safetensors_folder import SafetensorsFolder
from .safetensors_header import quoted
from .safetensors_index import TensorInfo

FLOAT_TYPES = ("F16", "BF16", "F32", "F64")

OTHER_FORMATS = {
    ".biases": "MLX stores it",
    ".weight.absmax": "bitsandbytes stores it",
    ".weight_scale_inv": "8-bit floats with scales beside them are",
    ".weight_scale": "8-bit or 4-bit floats with scales beside them are",
}
"""What lies beside a quantised matrix that is called `weight` like plain ones, and whose way that is."""

_VOCABULARY = ("embed", "head")
_LAYER = re.compile(r"^layers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True)
class WeightRequest:
    """A matrix that is asked for, and the place where it was found."""

    role: str
    location: TensorLocation
    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype | None  # of dense numbers; None: as stored
    device: torch.device
    own_bias: tuple[str, ...] = ()  # keys of its bias where the matrix itself is another role's


def key_at(place: TensorLocation, suffix: str) -> str:
    """The key of one tensor of a place."""
    return place.key if place.without_suffix and suffix == "weight" else f"{place.key}.{suffix}"


def num_rows(spans: Iterable[RowRange]) -> int:
    """How many rows these spans hold together."""
    return sum(stop - start for start, stop in spans)


class TensorIndex:
    """Stored tensors by canonical key, and which of them were asked for."""

    def __init__(
        self, files: SafetensorsFolder, names: TensorNames, quantization: GptqConfig | None = None
    ) -> None:
        self.files = files
        self.names = names
        self.quantization = quantization or GptqConfig()
        self._stored: dict[str, str] = {}  # canonical key → stored name
        self._by_location: dict[str, list[str]] = {}  # the same by key without its suffix
        for name in files.names():
            key = names.to_llama_key(name)
            if key in self._stored:
                first, second = files.info(self._stored[key]), files.info(name)
                raise BadFile(f"{first} and {second} both stand for {quoted(key)}; expected one of them.")
            self._stored[key] = name
            self._by_location.setdefault(key.rpartition(".")[0], []).append(name)
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def find(self, role: str, suffixes: Sequence[str]) -> tuple[TensorLocation, str] | None:
        """The best place that holds a role, and by which of these suffixes."""
        for place in self.names.locations_of(role):
            for suffix in suffixes:
                if key_at(place, suffix) in self._stored:
                    return place, suffix
        return None

    def info(self, key: str) -> TensorInfo:
        """What the header says of a tensor that is there."""
        return self.files.info(self._stored[key])

    def tensors_at(self, place: TensorLocation) -> list[TensorInfo]:
        """Every tensor whose key is that of a place and a suffix."""
        return [self.files.info(name) for name in self._by_location.get(place.key, ())]

    def use(self, key: str) -> TensorInfo:
        """The same as `peek`, by one who is about to read it."""
        info = self.info(key)
        self._used.add(info.name)
        return info

    def use_floats(self, key: str) -> TensorInfo:
        """The same as `ask`, if the tensor holds plain floats; scaled 8-bit ones mean nothing alone."""
        info = self.use(key)
        if info.dtype not in FLOAT_TYPES:
            raise BadTensor(
                f"{info}: expected one of the types {', '.join(FLOAT_TYPES)}, found {quoted(info.dtype)}"
                f"{self._other_format(key)}. Take a GPTQ, AWQ, EXL2 or GGUF version of the model, or one in "
                "plain floats."
            )
        return info

    def check_unscaled(self, role: str, place: TensorLocation) -> None:
        """`Unsupported` if the inputs of a matrix are divided by numbers of their own.

        So AutoAWQ leaves MLPs without a gate: the matrix is multiplied by what its activation is divided by.
        """
        key = f"{place.key.rpartition('.')[0]}.act.scales"
        if not role.endswith(".mlp.down") or key not in self:
            return
        info = self.use_floats(key)
        divides = bool((self.files.read(info.name) != 1).any())
        self.files.release(info.name)
        if divides:
            raise Unsupported(
                f"{info}: the inputs of {role} are to be divided by these numbers, as AutoAWQ has it where "
                "an MLP has no gate, and this version cannot. Take a GPTQ, EXL2 or plain version instead."
            )

    def _other_format(self, key: str) -> str:
        """Whose way to store a matrix this is, if other tensors beside it give that away."""
        base = key.removesuffix(".weight")
        for beside, words in OTHER_FORMATS.items():
            if base + beside in self:
                return f", as {words}"
        return ""

    def unused(self) -> list[str]:
        """Stored names that nobody has asked for."""
        return sorted(name for name in self.files.names() if name not in self._used)

    def stored_outputs(self, role: str, place: TensorLocation, width: int) -> int:
        """How many outputs the stored matrix has: `width`, or as far as the last role in it reaches."""
        if not place.rows:
            return width
        layer, expert = (found[1] if (found := number.search(role)) else "0" for number in (_LAYER, _EXPERT))
        kin = (
            one
            for _, places in self.names.locations
            for one in places
            if one.key.replace("{i}", layer).replace("{e}", expert) == place.key
        )
        return max(stop for one in (place, *kin) for _, stop in one.rows)

    def missing(self, what: str, keys: Sequence[str]) -> MissingTensor:
        """The error for a role whose keys are in none of the files."""
        indexed = {self.names.to_llama_key(name): name for name in self.files.index}
        hints = (self.files.hint(indexed[key]) for key in keys if key in indexed)
        remedy = "The folder is incomplete, or config.json describes another model."
        if what == "head":
            remedy += ' A model whose head is its embedding says so: "tie_word_embeddings": true.'
        hint = next(hints, remedy)
        looked = f"{len(self._stored)} tensors in {len(self.files.paths)} files"
        return MissingTensor(
            f"{self.files.folder}: {what} is missing: expected {' or '.join(map(quoted, keys))}, found no "
            f"such name among {looked}. {hint}"
        )

    def wrong_shape(self, info: TensorInfo, role: str, expected: str) -> BadTensor:
        """The error for a tensor whose shape is not what the model's description makes it."""
        remedy = "config.json describes another model than these weights are."
        if role in _VOCABULARY and info.shape and not expected.startswith(f"[{info.shape[0]},"):
            remedy = f"vocab_size in config.json must be the number of rows stored, {info.shape[0]}."
        return BadTensor(f"{info}: expected shape {expected} for {role}, found {list(info.shape)}. {remedy}")
