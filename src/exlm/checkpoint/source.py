"""The weights of one model by role: the protocol `WeightSource`, and `Checkpoint`, which finds roles in files.

A role has locations, tried in order of preference. The tensors at a location have a key in Llama's spelling, to which
stored names are translated, and a suffix: `q_proj.weight`, `q_proj.bias`. Finding them takes headers only.
`Checkpoint` also reads what is stored alike in every container, vectors and biases; a subclass for each container
reads matrices. Shapes are checked against those that the model's description expects, and nothing returned shares
memory with the files.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .tensor_files import TensorFiles, TensorInfo, quoted

Shape = tuple[int, ...]

_LAYER = re.compile(r"^layers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class WeightFiles(Protocol):
    """The files of a source."""

    @property
    def paths(self) -> tuple[Path, ...]: ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        ...


class WeightSource(Protocol):
    """The weights of one model by role; model code asks for them here and knows no files."""

    @property
    def files(self) -> WeightFiles: ...

    def has(self, role: str) -> bool:
        """Whether the files hold this role, in whatever form."""
        ...

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, bias included, from headers alone."""
        ...

    def unused(self) -> list[str]:
        """Stored names that were not asked for so far."""
        ...

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        """A float tensor that is no matrix to multiply with: a norm, an embedding, or a norm's bias.

        `shape` is the accepted shape, or several; with `finite`, NaN or infinity in the tensor is an error.
        """
        ...

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
        """A matrix to multiply with, in the form it is stored in; dense numbers in `dtype`, None: as stored.

        `fallback` is the role it is tied to, taken where the files do not hold `role` itself.
        """
        ...


@dataclass(frozen=True)
class MatrixRequest:
    """A matrix to be read, and where it was found."""

    role: str
    location: TensorLocation
    suffix: str  # of the tensor by which it was found
    in_features: int
    out_features: int
    dtype: torch.dtype | None  # of dense numbers; None: as stored
    device: torch.device


class Checkpoint(ABC):
    """A `WeightSource` that reads a model's files."""

    description_source = "config.json"  # where the model's description is from; begins a sentence in errors

    def __init__(self, files: TensorFiles, names: TensorNames, suffixes: Sequence[str]) -> None:
        """`suffixes` are those of the tensors by which a matrix is found, the preferred first."""
        self.files = files
        self.names = names
        self._suffixes = tuple(suffixes)
        self.names_by_key: dict[str, str] = {}  # stored names by their keys in Llama's spelling
        for name in files.tensors:
            key = names.to_llama_key(name)
            if key in self.names_by_key:
                first, second = files.info(self.names_by_key[key]), files.info(name)
                raise BadFile(f"{first} and {second} both stand for {quoted(key)}; expected one of them.")
            self.names_by_key[key] = name
        self._used: set[str] = set()

    def fingerprint(self) -> str:
        """Identifies the contents of the files, and what this object knows of them from elsewhere."""
        known = (type(self).__name__, self.names, self._interpretation())
        return hashlib.sha256(f"{self.files.fingerprint()} {known!r}".encode()).hexdigest()

    def _interpretation(self) -> object:
        """What a subclass knows, besides the files' contents, that changes how they are read."""
        return None

    def has(self, role: str) -> bool:
        """Whether the files hold this role, in whatever form."""
        return self.find(role) is not None

    def find(self, role: str) -> TensorLocation | None:
        """The location where the files hold this role."""
        found = self._find(role, self._suffixes)
        return found and found[0]

    @abstractmethod
    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, bias included, from headers alone."""

    def unused(self) -> list[str]:
        """Stored names that were not asked for so far."""
        return sorted(name for name in self.files.tensors if name not in self._used)

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        found = self._find(role, (suffix,))
        if found is None and suffix == "weight":
            location, marker = self._locate(role)  # it raises MissingTensor if the role is not stored at all
            raise Unsupported(
                f"{self._info(location.tensor_key(marker))}: {role} is stored as {self.describe(role)[0]}; "
                "expected plain floats."
            )
        if found is None:
            raise self._missing(
                f"the {suffix} of {role}", [location.tensor_key(suffix) for location in self.names.locations_of(role)]
            )
        location = found[0]
        info = self._use_floats(location.tensor_key(suffix))
        spans = location.rows or ((0, info.shape[0] if info.shape else 1),)
        stored = (num_rows(spans), *info.shape[1:]) if info.shape else ()
        shapes = [one for one in shape if isinstance(one, tuple)]
        shapes = shapes or [tuple(size for size in shape if isinstance(size, int))]
        if stored not in shapes or any(stop > info.shape[0] for _, stop in location.rows):
            raise self._wrong_shape(info, role, " or ".join(str(list(one)) for one in shapes))
        values = self._read_floats(info, spans, stored, dtype, device, finite=finite)
        return self._undo_conversion(role, suffix, values)

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
        location, suffix = self._locate(role, fallback)
        request = MatrixRequest(role, location, suffix, in_features, out_features, dtype, device)
        return replace(self._read_matrix(request), bias=self._read_bias(request, wanted=bias))

    @abstractmethod
    def _read_matrix(self, request: MatrixRequest) -> DenseWeight | PackedWeight:
        """The matrix without its bias, on the device."""

    def _read_bias(self, request: MatrixRequest, *, wanted: bool) -> Tensor | None:
        """The bias of a matrix, required if the architecture has one; else one of zeros is accepted."""
        role, location, n = request.role, request.location, request.out_features
        keys = [f"{location.key}.bias"]
        if location not in (own := self.names.locations_of(role)):
            keys += [f"{one.key}.bias" for one in own]  # a tied matrix may have a bias under its own name
        key = next((one for one in keys if one in self.names_by_key), None)
        if key is None:
            if wanted:
                raise self._missing(f"the bias of {role}", keys)
            return None
        info = self._use_floats(key)
        spans: tuple[RowRange, ...] = ((0, n),)
        length = n
        if location.rows and key == keys[0]:
            spans, length = location.rows, self._stored_outputs(role, location, n)
        if info.shape != (length,) or num_rows(spans) != n:
            raise self._wrong_shape(info, f"the bias of {role}", str([length]))
        if wanted:
            values = self._read_floats(info, spans, (n,), request.dtype, request.device)
            return self._undo_conversion(role, "bias", values)
        values = self._read_floats(info, spans, (n,), None, torch.device("cpu"))
        if odd := int(torch.count_nonzero(values)):
            raise BadTensor(
                f"{info}: expected no bias for {role}, or one of zeros; found {odd} of {n} not zero. "
                f"{self.description_source} describes another architecture than these weights have."
            )
        return None

    @abstractmethod
    def _read_floats(
        self,
        info: TensorInfo,
        spans: Sequence[RowRange],
        shape: Shape,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        finite: bool = False,
    ) -> Tensor:
        """A copy of these rows in `dtype`, None: as stored; errors as `CastErrors.check` raises them."""

    def _undo_conversion(self, _role: str, _suffix: str, values: Tensor) -> Tensor:
        """A vector as the model has it, where the program that wrote the files changed it."""
        return values

    def _find(self, role: str, suffixes: Sequence[str]) -> tuple[TensorLocation, str] | None:
        """The first location that holds a role, and the first of these suffixes that is stored there."""
        for location in self.names.locations_of(role):
            for suffix in suffixes:
                if location.tensor_key(suffix) in self.names_by_key:
                    return location, suffix
        return None

    def _locate(self, role: str, fallback: str | None = None) -> tuple[TensorLocation, str]:
        roles = (role,) if fallback is None else (role, fallback)
        for one in roles:
            if found := self._find(one, self._suffixes):
                return found
        keys = [location.tensor_key("weight") for one in roles for location in self.names.locations_of(one)]
        raise self._missing(role, keys)

    def _info(self, key: str) -> TensorInfo:
        return self.files.info(self.names_by_key[key])

    def _use(self, key: str) -> TensorInfo:
        """The header entry of a tensor that is about to be read: `unused` no longer lists it."""
        info = self._info(key)
        self._used.add(info.name)
        return info

    def _use_floats(self, key: str) -> TensorInfo:
        """`_use` for a tensor that is read as plain floats; a subclass refuses one whose values need scales."""
        return self._use(key)

    def _stored_outputs(self, role: str, location: TensorLocation, outputs: int) -> int:
        """The outputs of the stored matrix: those of the role, or of all roles that are fused into one matrix."""
        if not location.rows:
            return outputs
        layer, expert = (found[1] if (found := number.search(role)) else "0" for number in (_LAYER, _EXPERT))
        fused = (
            one
            for _, locations in self.names.locations
            for one in locations
            if one.key.replace("{i}", layer).replace("{e}", expert) == location.key
        )
        return max(stop for one in (location, *fused) for _, stop in one.rows)

    def _missing(self, what: str, keys: Sequence[str]) -> MissingTensor:
        looked = f"{len(self.names_by_key)} tensors in {len(self.files.paths)} files"
        return MissingTensor(
            f"{self.files.path}: {what} is missing: expected {' or '.join(map(quoted, keys))}, found no "
            f"such name among {looked}. {self._explain_missing(what, keys)}"
        )

    def _explain_missing(self, _what: str, _keys: Sequence[str]) -> str:
        """The likely reason why tensors are missing, as sentences."""
        return f"{self.description_source} describes another model, or the weights are incomplete."

    def _wrong_shape(self, info: TensorInfo, role: str, expected: str) -> BadTensor:
        return BadTensor(
            f"{info}: expected shape {expected} for {role}, found {list(info.shape)}. "
            f"{self._explain_wrong_shape(info, role, expected)}"
        )

    def _explain_wrong_shape(self, _info: TensorInfo, _role: str, _expected: str) -> str:
        """The likely reason why a tensor has another shape, as a sentence."""
        return f"{self.description_source} describes another model than these weights are."


def num_rows(spans: Iterable[RowRange]) -> int:
    """How many rows these spans hold together."""
    return sum(stop - start for start, stop in spans)


@dataclass
class CastErrors:
    """Counts of values that a copy in another type could not represent."""

    overflowed: int = 0  # finite as stored, infinite in the target's type
    non_finite: int = 0  # NaN or infinite as stored

    def copy(self, source: Tensor, target: Tensor, *, check: bool = False) -> None:
        """Cast `source` into `target`; errors are counted where its type is narrower, and elsewhere with `check`."""
        # Cast on the target's device and into the target: temporary blocks of this size would fragment the CPU's
        # heap, and the process would grow by as much with each tensor.
        source = source.to(target.device)
        target.copy_(source)
        self.count(source, target, check=check or torch.finfo(target.dtype).max < torch.finfo(source.dtype).max)

    def count(self, source: Tensor, target: Tensor, *, check: bool) -> None:
        """Count the errors of a copy, with `check`."""
        if not check or not target.numel():
            return
        # One pass finds whether anything is not finite: aminmax propagates NaN.
        low, high = torch.aminmax(target)
        if not (low.isfinite() and high.isfinite()):
            unbounded = source.numel() - int(source.isfinite().sum())
            self.non_finite += unbounded
            self.overflowed += target.numel() - int(target.isfinite().sum()) - unbounded

    def check(self, info: TensorInfo, copied: Tensor, *, finite: bool = False) -> None:
        """BadTensor if values of the whole copy overflowed or, with `finite`, are not finite."""
        if self.overflowed:
            dtype = str(copied.dtype).removeprefix("torch.")
            raise BadTensor(
                f"{info}: {self.overflowed} of {copied.numel()} values are too large for {dtype} (stored as "
                f"{info.dtype}). Compute in bfloat16 or float32 instead."
            )
        if finite and self.non_finite:
            raise BadTensor(
                f"{info}: expected finite values, found {self.non_finite} of {copied.numel()} NaN or "
                "infinite. Download or convert the file again."
            )
