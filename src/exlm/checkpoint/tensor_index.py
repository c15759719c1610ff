"""`TensorIndex`: which stored tensors a role means, and the errors for roles that none or the wrong ones fit.

A role has locations, tried in order of preference, and a location has keys in Llama's spelling, to which
stored names are translated. Headers are enough for all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .file_access import quoted
from .safetensors_files import SafetensorsFolder, TensorInfo

FLOAT_TYPES = ("F16", "BF16", "F32", "F64")

OTHER_FORMATS = {
    ".biases": "MLX stores it",
    ".weight.absmax": "bitsandbytes stores it",
    ".weight_scale_inv": "8-bit floats with scales beside them are",
    ".weight_scale": "8-bit or 4-bit floats with scales beside them are",
}
"""Suffixes of tensors beside a quantised matrix that is called `weight` as plain ones are, and who stores it
so."""

_VOCABULARY = ("embed", "head")
_LAYER = re.compile(r"^layers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


Shape = tuple[int, ...]


def tensor_key(location: TensorLocation, suffix: str) -> str:
    """The key of one tensor of a location."""
    return location.key if location.without_suffix and suffix == "weight" else f"{location.key}.{suffix}"


def num_rows(spans: Iterable[RowRange]) -> int:
    """How many rows these spans hold together."""
    return sum(stop - start for start, stop in spans)


def accepted_shapes(shape: Shape | tuple[Shape, ...]) -> tuple[Shape, ...]:
    """One accepted shape or several, as several."""
    several = tuple(one for one in shape if isinstance(one, tuple))
    return several or (tuple(size for size in shape if isinstance(size, int)),)


class TensorIndex:
    """Stored tensors by their key in Llama's spelling, and which of them were used."""

    def __init__(self, files: SafetensorsFolder, names: TensorNames) -> None:
        self.files = files
        self.names = names
        self._stored: dict[str, str] = {}  # key → stored name
        self._by_location: dict[str, dict[str, str]] = {}  # key without its suffix → suffix → stored name
        for name in files.names():
            key = names.to_llama_key(name)
            if key in self._stored:
                first, second = files.info(self._stored[key]), files.info(name)
                raise BadFile(f"{first} and {second} both stand for {quoted(key)}; expected one of them.")
            self._stored[key] = name
            location, _, suffix = key.rpartition(".")
            self._by_location.setdefault(location, {})[suffix] = name
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def find(self, role: str, suffixes: Sequence[str]) -> tuple[TensorLocation, str] | None:
        """The first location that holds a role, and the first of these suffixes that is stored there."""
        for location in self.names.locations_of(role):
            for suffix in suffixes:
                if tensor_key(location, suffix) in self._stored:
                    return location, suffix
        return None

    def info(self, key: str) -> TensorInfo:
        """The header entry of a stored tensor."""
        return self.files.info(self._stored[key])

    def tensors_at(self, location: TensorLocation) -> dict[str, TensorInfo]:
        """Every tensor of a location, by suffix."""
        stored = self._by_location.get(location.key, {})
        return {suffix: self.files.info(name) for suffix, name in stored.items()}

    def use(self, key: str) -> TensorInfo:
        """The same as `info`, for a tensor that is about to be read: `unused` no longer lists it."""
        info = self.info(key)
        self._used.add(info.name)
        return info

    def use_floats(self, key: str) -> TensorInfo:
        """The same as `use`; BadTensor unless the tensor holds plain floats, which need no scales."""
        info = self.use(key)
        if info.dtype not in FLOAT_TYPES:
            raise BadTensor(
                f"{info}: expected one of the types {', '.join(FLOAT_TYPES)}, found {quoted(info.dtype)}"
                f"{self._other_format(key)}. Take a GPTQ, AWQ, EXL2 or GGUF version of the model, or one in "
                "plain floats."
            )
        return info

    def check_unscaled(self, role: str, location: TensorLocation) -> None:
        """`Unsupported` if a matrix needs its inputs divided by stored numbers other than one.

        AutoAWQ stores MLPs without a gate so: it scales the matrix up and the activations down.
        """
        key = f"{location.key.rpartition('.')[0]}.act.scales"
        if not role.endswith(".mlp.down") or key not in self:
            return
        info = self.use_floats(key)
        divides = bool((self.files.view(info.name) != 1).any())
        self.files.release(info.name)
        if divides:
            raise Unsupported(
                f"{info}: the inputs of {role} are to be divided by these numbers, as AutoAWQ has it where "
                "an MLP has no gate, and this version cannot. Take a GPTQ, EXL2 or plain version instead."
            )

    def _other_format(self, key: str) -> str:
        """Which other format tensors beside this one belong to, as a clause for an error; perhaps empty."""
        base = key.removesuffix(".weight")
        for beside, words in OTHER_FORMATS.items():
            if base + beside in self:
                return f", as {words}"
        return ""

    def unused(self) -> list[str]:
        """Stored names that were not used."""
        return sorted(name for name in self.files.names() if name not in self._used)

    def stored_outputs(self, role: str, location: TensorLocation, width: int) -> int:
        """How many outputs the stored matrix has: `width`, or the last row of any role fused into it."""
        if not location.rows:
            return width
        layer, expert = (found[1] if (found := number.search(role)) else "0" for number in (_LAYER, _EXPERT))
        fused = (
            one
            for _, locations in self.names.locations
            for one in locations
            if one.key.replace("{i}", layer).replace("{e}", expert) == location.key
        )
        return max(stop for one in (location, *fused) for _, stop in one.rows)

    def missing(self, what: str, keys: Sequence[str]) -> MissingTensor:
        """The error for a role whose keys are in none of the files."""
        indexed = {self.names.to_llama_key(name): name for name in self.files.index}
        hints = (self.files.explain_missing(indexed[key]) for key in keys if key in indexed)
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
