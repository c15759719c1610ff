"""The weights of a model folder by role, whatever its files call them and however they store them.

One call reads one matrix from top to bottom: find the role's tensors and their format, load them, have the
format check and decode them, cut the matrix out of a fused one, move it, add the bias. Shapes are checked
against those that the model's description expects, and nothing returned shares memory with the files: floats
are cast as they are copied, a few megabytes at a time, and the file's pages are released as they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import BadTensor, Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..formats.quantization_config import QuantizationConfig
from ..formats.registry import DENSE, FORMATS, MatrixFormat
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .safetensors_files import DTYPES, SafetensorsFolder, TensorInfo, flatten_experts
from .tensor_index import Shape, TensorIndex, accepted_shapes, num_rows, tensor_key

COPY_CHUNK = 8 * 2**20
"""Bytes of a file that are cast at once."""


@dataclass(frozen=True)
class WeightRequest:
    """A matrix to be read, and where it was found."""

    role: str
    location: TensorLocation
    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype | None  # of dense numbers; None: as stored
    device: torch.device
    own_bias: tuple[str, ...] = ()  # keys of its bias where the matrix is stored under another role


class SafetensorsCheckpoint:
    """The weights of one model folder, by role."""

    def __init__(
        self, files: SafetensorsFolder, names: TensorNames, quantization: QuantizationConfig | None = None
    ) -> None:
        self.files = files
        self.names = names
        self.quantization = quantization or QuantizationConfig()
        self._index = TensorIndex(files, names)
        method = self.quantization.method
        self._formats = tuple(fmt for fmt in FORMATS if fmt.quant_method in (None, method))
        self._markers = tuple(fmt.marker for fmt in self._formats)

    @classmethod
    def open(
        cls, folder: Path, names: TensorNames, quantization: QuantizationConfig | None = None
    ) -> SafetensorsCheckpoint:
        """The checkpoint in a model folder; only headers are read.

        `quantization` is what the JSON beside the weights says of GPTQ or AWQ tensors.
        """
        return cls(SafetensorsFolder(folder), names, quantization)

    def has(self, role: str) -> bool:
        """Whether the files hold this role, in whatever format."""
        return self.find(role) is not None

    def find(self, role: str) -> TensorLocation | None:
        """The location where the files hold this role."""
        found = self._index.find(role, self._markers)
        return found and found[0]

    def check_unscaled(self, role: str) -> None:
        """`Unsupported` if the matrix that the files hold needs more than a product to be computed."""
        if location := self.find(role):
            self._index.check_unscaled(role, location)

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored format in a few words and its stored bytes, bias included, from headers alone."""
        location, fmt = self._locate(role, fallback)
        if fmt is not DENSE:
            stored = self._index.tensors_at(location)
            shapes = {suffix: info.shape for suffix, info in stored.items()}
            words = fmt.name
            if fmt.describe is not None:
                words = fmt.describe(shapes, lambda suffix: self.files.view(stored[suffix].name), self.quantization)
            return words, sum(info.nbytes for info in stored.values())
        info = self._index.info(tensor_key(location, DENSE.marker))
        total = info.nbytes
        if location.expert_rows:
            total = total * location.rows_per_expert // max((1, *flatten_experts(info).shape[:1]))
        if f"{location.key}.bias" in self._index:
            total += self._index.info(f"{location.key}.bias").nbytes
        if location.rows:
            total = total * num_rows(location.rows) // self._index.stored_outputs(role, location, 0)
        return f"{fmt.name} {str(DTYPES.get(info.dtype, info.dtype)).removeprefix('torch.')}", total

    def unused(self) -> list[str]:
        """Stored names that were not asked for so far."""
        return self._index.unused()

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
        location = self._locate_floats(role, suffix)
        info = self._index.use_floats(tensor_key(location, suffix))
        spans = location.rows or ((0, info.shape[0] if info.shape else 1),)
        found = (num_rows(spans), *info.shape[1:]) if info.shape else ()
        shapes = accepted_shapes(shape)
        if found not in shapes or any(stop > info.shape[0] for _, stop in location.rows):
            raise self._index.wrong_shape(info, role, " or ".join(str(list(one)) for one in shapes))
        return self._copy(info, spans, found, dtype, device, finite=finite)

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
        """A matrix to multiply with, in whatever format; dense numbers in `dtype`, None: as stored.

        `fallback` is the role it is tied to, taken where the files do not hold `role` itself.
        """
        location, fmt = self._locate(role, fallback)
        self._index.check_unscaled(role, location)
        own_locations = self.names.locations_of(role)
        own_bias = () if location in own_locations else tuple(f"{one.key}.bias" for one in own_locations)
        request = WeightRequest(role, location, in_features, out_features, bias, dtype, device, own_bias)
        weight = self._read_dense(request) if fmt is DENSE else self._read_packed(request, fmt)
        return replace(weight, bias=self._read_bias(request))

    def _read_packed(self, request: WeightRequest, fmt: MatrixFormat) -> PackedWeight:
        """The matrix as its format decodes it: the requested outputs, on their device."""
        role, location = request.role, request.location
        if fmt.read is None:
            info = self._index.info(tensor_key(location, fmt.marker))
            raise Unsupported(f"{info}: {role} is stored as {fmt.name}, which this version cannot read.")
        infos = {
            suffix: self._index.use(key)
            for suffix in fmt.tensors
            if (key := tensor_key(location, suffix)) in self._index
        }
        where = f"{next(iter(infos.values())).file}: {location.key}"
        tensors = {suffix: self.files.load(info.name) for suffix, info in infos.items()}
        outputs = self._index.stored_outputs(role, location, request.out_features)
        weight = fmt.read(tensors, request.in_features, outputs, None, where, self.quantization)
        if location.rows:
            weight = weight.take_columns(torch.cat([torch.arange(*span) for span in location.rows]))
        return weight.to(request.device)

    def _read_dense(self, request: WeightRequest) -> DenseWeight:
        """A matrix of plain floats: a whole tensor or some of its rows, transposed if stored (in, out)."""
        location, n, k = request.location, request.out_features, request.in_features
        info = self._index.use_floats(tensor_key(location, DENSE.marker))
        info = flatten_experts(info) if location.expert_rows else info
        outputs = self._index.stored_outputs(request.role, location, n)
        rows, columns = (k, outputs) if location.transposed else (outputs, k)
        spans = location.rows or ((0, n),)
        expert = location.expert_rows or (0, rows)
        # How many experts are stacked is not known here, only that this one is among them.
        stored = max((expert[1], *info.shape[:1])) if location.expert_rows else rows
        if info.shape != (stored, columns) or num_rows(spans) != n or num_rows([expert]) != rows:
            cut = f" ({num_rows(spans)} of {outputs} outputs)" if location.rows else ""
            raise self._index.wrong_shape(info, request.role, f"{[stored, columns]}{cut}")
        dtype = request.dtype or DTYPES[info.dtype]
        if location.transposed:
            data = torch.empty((n, k), dtype=dtype, device=request.device)
            _check_overflow(info, data, copy_transposed(self.files, info, expert, spans, data))
            return DenseWeight(data)
        spans = tuple((expert[0] + start, expert[0] + stop) for start, stop in spans)
        return DenseWeight(self._copy(info, spans, (n, k), dtype, request.device))

    def _read_bias(self, request: WeightRequest) -> torch.Tensor | None:
        """The bias of a matrix, required if the architecture has one; else one of zeros is accepted."""
        location, n = request.location, request.out_features
        beside = f"{location.key}.bias"
        key = next((one for one in (beside, *request.own_bias) if one in self._index), None)
        if key is None:
            if request.bias:
                raise self._index.missing(f"the bias of {request.role}", (beside, *request.own_bias))
            return None
        info = self._index.use_floats(key)
        spans: tuple[RowRange, ...] = ((0, n),)
        length = n
        if location.rows and key == beside:
            spans, length = location.rows, self._index.stored_outputs(request.role, location, n)
        if info.shape != (length,) or num_rows(spans) != n:
            raise self._index.wrong_shape(info, f"the bias of {request.role}", str([length]))
        if request.bias:
            return self._copy(info, spans, (n,), request.dtype or DTYPES[info.dtype], request.device)
        stored = self._copy(info, spans, (n,), DTYPES[info.dtype], torch.device("cpu"))
        if odd := int(torch.count_nonzero(stored)):
            raise BadTensor(
                f"{info}: expected no bias for {request.role}, or one of zeros; found {odd} of {n} not zero. "
                "config.json describes another architecture than these weights have."
            )
        return None

    def _copy(
        self,
        info: TensorInfo,
        spans: Sequence[RowRange],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        finite: bool = False,
    ) -> torch.Tensor:
        """A copy of these rows; BadTensor if values overflow or, with `finite`, are not finite."""
        target = torch.empty(shape, dtype=dtype, device=device)
        errors = copy_rows(self.files, info, spans, target, check=finite)
        _check_overflow(info, target, errors)
        if finite and errors.non_finite:
            raise BadTensor(
                f"{info}: expected finite values, found {errors.non_finite} of {target.numel()} NaN or "
                "infinite. Download or convert the file again."
            )
        return target

    def _locate(self, role: str, fallback: str | None) -> tuple[TensorLocation, MatrixFormat]:
        roles = (role,) if fallback is None else (role, fallback)
        for one in roles:
            if found := self._index.find(one, self._markers):
                return found[0], self._formats[self._markers.index(found[1])]
        keys = [tensor_key(location, "weight") for one in roles for location in self.names.locations_of(one)]
        raise self._index.missing(role, keys)

    def _locate_floats(self, role: str, suffix: str) -> TensorLocation:
        if found := self._index.find(role, (suffix,)):
            return found[0]
        if suffix == DENSE.marker:
            location, fmt = self._locate(role, None)
            raise Unsupported(
                f"{self._index.info(tensor_key(location, fmt.marker))}: {role} is stored as {fmt.name}; "
                "expected plain floats."
            )
        raise self._index.missing(
            f"the {suffix} of {role}", [tensor_key(location, suffix) for location in self.names.locations_of(role)]
        )


# -- casts -----------------------------------------------------------------------------------------


@dataclass
class CastErrors:
    """Counts of values that a copy could not represent."""

    overflowed: int = 0  # finite as stored, infinite in the target's type
    non_finite: int = 0  # NaN or infinite as stored


def copy_rows(
    files: SafetensorsFolder, info: TensorInfo, spans: Sequence[RowRange], target: torch.Tensor, *, check: bool = False
) -> CastErrors:
    """Fill `target` with these rows of a tensor, one span after the other.

    Errors are counted where the target's type is narrower than the stored one, and elsewhere with `check`.
    """
    errors = CastErrors()
    if not info.shape:
        _cast_into(files.view(info.name), target, errors, check)
        return errors
    as_stored = target.device.type == "cpu" and target.dtype is files.dtype(info.name)
    at = 0
    for first, last in spans:
        part = target[at : at + last - first]
        if as_stored:
            files.load_rows(info, first, part)
            _count_errors(part, part, errors, check)
        else:
            _cast_rows(files, info, (first, last), part, errors, check)
        at += last - first
    return errors


def copy_transposed(
    files: SafetensorsFolder, info: TensorInfo, rows: RowRange, spans: Sequence[RowRange], target: torch.Tensor
) -> CastErrors:
    """Fill `target` with the transpose of these columns of some rows, one span after the other."""
    errors = CastErrors()
    for start, stop in _chunks(info, *rows):
        source = files.view_rows(info, start, stop).to(target.device)
        at = 0
        for first, last in spans:
            part = target[at : at + last - first, start - rows[0] : stop - rows[0]]
            _cast_into(source[:, first:last].T, part, errors, check=False)
            at += last - first
        files.release(info, start, stop)
    files.release(info)
    return errors


def _cast_rows(
    files: SafetensorsFolder, info: TensorInfo, rows: RowRange, target: torch.Tensor, errors: CastErrors, check: bool
) -> None:
    for start, stop in _chunks(info, *rows):
        part = target[start - rows[0] : stop - rows[0]]
        _cast_into(files.view_rows(info, start, stop), part, errors, check)
        files.release(info, start, stop)
    files.release(info)


def _chunks(info: TensorInfo, first: int, last: int) -> Iterator[RowRange]:
    rows = info.shape[0]
    step = max(1, COPY_CHUNK * rows // max(1, info.nbytes))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _cast_into(source: torch.Tensor, target: torch.Tensor, errors: CastErrors, check: bool) -> None:
    # Cast on the target's device and into the target: temporary blocks of this size would fragment the CPU's
    # heap, and the process would grow by as much with each tensor.
    source = source.to(target.device)
    target.copy_(source)
    narrows = torch.finfo(target.dtype).max < torch.finfo(source.dtype).max
    _count_errors(source, target, errors, check or narrows)


def _count_errors(source: torch.Tensor, target: torch.Tensor, errors: CastErrors, check: bool) -> None:
    if not check or not target.numel():
        return
    # One pass finds whether anything is not finite: aminmax propagates NaN.
    low, high = torch.aminmax(target)
    if not (low.isfinite() and high.isfinite()):
        unbounded = source.numel() - int(source.isfinite().sum())
        errors.non_finite += unbounded
        errors.overflowed += target.numel() - int(target.isfinite().sum()) - unbounded


def _check_overflow(info: TensorInfo, copied: torch.Tensor, errors: CastErrors) -> None:
    if errors.overflowed:
        dtype = str(copied.dtype).removeprefix("torch.")
        raise BadTensor(
            f"{info}: {errors.overflowed} of {copied.numel()} values are too large for {dtype} (stored as "
            f"{info.dtype}). Compute in bfloat16 or float32 instead."
        )
