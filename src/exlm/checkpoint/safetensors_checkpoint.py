"""The weights of a model folder by role, whatever its files call them and however they store them.

A matrix is read from top to bottom: load its tensors, have their format check and decode them (`formats.FORMATS`),
cut the matrix out of a fused one, move it. Floats are cast as they are copied, a few megabytes at a time, and the
file's pages are released as they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadTensor, Unsupported
from ..formats import DENSE, FORMATS, DenseWeight, PackedWeight
from ..formats.quantization_config import QuantizationConfig
from ..spec.tensor_names import RowRange, TensorNames
from .safetensors_files import DTYPES, FLOAT_TYPES, SafetensorsFolder
from .source import CastErrors, Checkpoint, MatrixRequest, Shape, num_rows
from .tensor_files import TensorInfo, quoted

COPY_CHUNK = 8 * 2**20
"""Bytes of a file that are cast at once."""

OTHER_FORMATS = {
    ".biases": "MLX stores it",
    ".weight.absmax": "bitsandbytes stores it",
    ".weight_scale_inv": "8-bit floats with scales beside them are",
    ".weight_scale": "8-bit or 4-bit floats with scales beside them are",
}
"""By the suffix of a tensor beside `weight`: the format, which exlm does not read, that has such a tensor.

These formats call the tensor of quantised values `weight`, as if it were plain floats; errors say which it is."""


class SafetensorsCheckpoint(Checkpoint):
    """The weights of one model folder, by role."""

    files: SafetensorsFolder

    def __init__(self, folder: Path, names: TensorNames, quantization: QuantizationConfig | None = None) -> None:
        """Read the headers only; `quantization` is what the JSON beside the weights says of GPTQ or AWQ tensors."""
        self.quantization = quantization or QuantizationConfig()
        method = self.quantization.method
        self._formats = {fmt.marker: fmt for fmt in FORMATS if fmt.quant_method in (None, method)}
        super().__init__(SafetensorsFolder(folder), names, tuple(self._formats))
        self._keys_at: dict[str, list[str]] = {}  # key without its suffix → keys of all tensors there
        for key in self.names_by_key:
            self._keys_at.setdefault(key.rpartition(".")[0], []).append(key)

    def _interpretation(self) -> object:
        return self.quantization

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored format in a few words and its stored bytes, bias included, from headers alone."""
        location, marker = self._locate(role, fallback)
        fmt = self._formats[marker]
        if fmt is not DENSE:
            stored = {key.rpartition(".")[2]: self._info(key) for key in self._keys_at[location.key]}
            words = fmt.name
            if fmt.describe is not None:
                shapes = {suffix: info.shape for suffix, info in stored.items()}
                words = fmt.describe(shapes, lambda suffix: self.files.view(stored[suffix].name), self.quantization)
            total = sum(info.nbytes for info in stored.values())
            if location.rows:  # its share of a fused matrix
                total = total * num_rows(location.rows) // self._stored_outputs(role, location, 0)
            return words, total
        info = self._info(location.tensor_key(marker))
        total = info.nbytes
        if location.expert_rows:
            total = total * location.rows_per_expert // max((1, *_flatten_experts(info).shape[:1]))
        if f"{location.key}.bias" in self.names_by_key:
            total += self._info(f"{location.key}.bias").nbytes
        if location.rows:
            total = total * num_rows(location.rows) // self._stored_outputs(role, location, 0)
        return f"dense {str(DTYPES.get(info.dtype, info.dtype)).removeprefix('torch.')}", total

    def refuse_scaled_inputs(self, role: str) -> None:
        """`Unsupported` if the inputs of a matrix are to be divided by stored numbers other than one.

        AutoAWQ stores such numbers where an MLP has no gate: the matrix is multiplied by them, so its inputs must be
        divided.
        """
        location = self.find(role) if role.endswith(".mlp.down") else None
        key = "" if location is None else f"{location.key.rpartition('.')[0]}.act.scales"
        if key not in self.names_by_key:
            return
        info = self._use_floats(key)
        divides = bool((self.files.view(info.name) != 1).any())
        self.files.release(info.name)
        if divides:
            raise Unsupported(
                f"{info}: the inputs of {role} are to be divided by these numbers, as AutoAWQ has it where "
                "an MLP has no gate, and this version cannot. Take a GPTQ, EXL2 or plain version instead."
            )

    def _read_matrix(self, request: MatrixRequest) -> DenseWeight | PackedWeight:
        self.refuse_scaled_inputs(request.role)
        return self._read_dense(request) if request.suffix == DENSE.marker else self._read_packed(request)

    def _read_packed(self, request: MatrixRequest) -> PackedWeight:
        """The matrix as its format decodes it: the requested outputs, on their device."""
        role, location, fmt = request.role, request.location, self._formats[request.suffix]
        if fmt.read is None:
            info = self._info(location.tensor_key(request.suffix))
            raise Unsupported(f"{info}: {role} is stored as {fmt.name}, which this version cannot read.")
        keys = {suffix: location.tensor_key(suffix) for suffix in fmt.tensors}
        infos = {suffix: self._use(key) for suffix, key in keys.items() if key in self.names_by_key}
        where = f"{next(iter(infos.values())).file}: {location.key}"
        tensors = {suffix: self.files.load(info.name) for suffix, info in infos.items()}
        outputs = self._stored_outputs(role, location, request.out_features)
        weight = fmt.read(tensors, request.in_features, outputs, where, self.quantization)
        if location.rows:
            weight = weight.take_columns(torch.cat([torch.arange(*span) for span in location.rows]))
        return weight.to(request.device)

    def _read_dense(self, request: MatrixRequest) -> DenseWeight:
        """A matrix of plain floats: a whole tensor or some of its rows, transposed if stored (in, out)."""
        location, n, k = request.location, request.out_features, request.in_features
        info = self._use_floats(location.tensor_key(DENSE.marker))
        info = _flatten_experts(info) if location.expert_rows else info
        outputs = self._stored_outputs(request.role, location, n)
        rows, columns = (k, outputs) if location.transposed else (outputs, k)
        spans = location.rows or ((0, n),)
        expert = location.expert_rows or (0, rows)
        # How many experts are stacked is not known here, only that this one is among them.
        stored = max((expert[1], *info.shape[:1])) if location.expert_rows else rows
        if info.shape != (stored, columns) or num_rows(spans) != n or num_rows([expert]) != rows:
            cut = f" ({num_rows(spans)} of {outputs} outputs)" if location.rows else ""
            raise self._wrong_shape(info, request.role, f"{[stored, columns]}{cut}")
        if location.transposed:
            data = torch.empty((n, k), dtype=request.dtype or DTYPES[info.dtype], device=request.device)
            self._copy_transposed(info, expert, spans, data)
            return DenseWeight(data)
        spans = tuple((expert[0] + start, expert[0] + stop) for start, stop in spans)
        return DenseWeight(self._read_floats(info, spans, (n, k), request.dtype, request.device))

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
        stored = DTYPES[info.dtype]
        target = torch.empty(shape, dtype=dtype or stored, device=device)
        errors = CastErrors()
        if not info.shape:
            errors.copy(self.files.view(info.name), target, check=finite)
            spans = ()
        at = 0
        for start, stop in spans:
            part = target[at : at + stop - start]
            at += stop - start
            if part.device.type == "cpu" and part.dtype is stored:
                self.files.load_rows(info, start, part)
                errors.count(part, part, check=finite)
                continue
            for first, last in _chunks(info, start, stop):
                rows = self.files.view_rows(info, first, last)
                errors.copy(rows, part[first - start : last - start], check=finite)
                self.files.release(info, first, last)
            self.files.release(info)
        errors.check(info, target, finite=finite)
        return target

    def _copy_transposed(self, info: TensorInfo, rows: RowRange, spans: Sequence[RowRange], target: Tensor) -> None:
        """Fill `target` with the transpose of these columns of some rows, one span after the other."""
        errors = CastErrors()
        for start, stop in _chunks(info, *rows):
            source = self.files.view_rows(info, start, stop).to(target.device)
            at = 0
            for first, last in spans:
                part = target[at : at + last - first, start - rows[0] : stop - rows[0]]
                errors.copy(source[:, first:last].T, part)
                at += last - first
            self.files.release(info, start, stop)
        self.files.release(info)
        errors.check(info, target)

    def _use_floats(self, key: str) -> TensorInfo:
        """The header entry of a tensor of plain floats that is about to be read; BadTensor if it needs scales."""
        info = self._use(key)
        if info.dtype not in FLOAT_TYPES:
            base = key.removesuffix(".weight")
            other = next((words for beside, words in OTHER_FORMATS.items() if base + beside in self.names_by_key), None)
            raise BadTensor(
                f"{info}: expected one of the types {', '.join(FLOAT_TYPES)}, found {quoted(info.dtype)}"
                f"{', as ' + other if other else ''}. Take a GPTQ, AWQ, EXL2 or GGUF version of the model, or one in "
                "plain floats."
            )
        return info

    def _explain_missing(self, what: str, keys: Sequence[str]) -> str:
        indexed = {self.names.to_llama_key(name): name for name in self.files.index}
        hints = (self.files.explain_missing(indexed[key]) for key in keys if key in indexed)
        remedy = super()._explain_missing(what, keys)
        if what == "head":
            remedy += ' A model whose head is its embedding says so: "tie_word_embeddings": true.'
        return next(hints, remedy)

    def _explain_wrong_shape(self, info: TensorInfo, role: str, expected: str) -> str:
        if role in ("embed", "head") and info.shape and not expected.startswith(f"[{info.shape[0]},"):
            return f"vocab_size in config.json must be the number of rows stored, {info.shape[0]}."
        return super()._explain_wrong_shape(info, role, expected)


def _flatten_experts(info: TensorInfo) -> TensorInfo:
    """Experts stacked in a third dimension (experts, rows, columns) as (experts · rows, columns)."""
    if len(info.shape) != 3:
        return info
    experts, rows, columns = info.shape
    return replace(info, shape=(experts * rows, columns))


def _chunks(info: TensorInfo, first: int, last: int) -> Iterator[RowRange]:
    rows = info.shape[0]
    step = max(1, COPY_CHUNK * rows // max(1, info.nbytes))
    for start in range(first, last, step):
        yield start, min(start + step, last)
