"""The weights of a GGUF file by role, as `SafetensorsCheckpoint` gives those of a folder.

Matrices stay quantised where their type allows. What llama.cpp's converter changed is undone (the interleaved
rows of q and k for RoPE, the one added to Gemma's norms), so that one description of a model fits its folder
and its GGUF file. Every shape is checked, and nothing returned shares memory with the file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import BadTensor, MissingTensor, Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..formats.gguf import read
from ..formats.gguf_types import FLOAT_TYPES
from ..spec.tensor_names import RowRange, TensorLocation
from .file_access import quoted
from .gguf_file import ROPE_FACTORS, GgufFile
from .gguf_header import GgufTensor
from .gguf_tensor_names import NORMS, gguf_tensor_names, role_in_layer
from .tensor_index import Shape, accepted_shapes, num_rows

DEQUANTIZE_CHUNK = 2**21
"""Values dequantised at once."""

_LAYER = re.compile(r"^blk\.\d+\.")


class GgufCheckpoint:
    """The weights of one model in a GGUF file, by role."""

    def __init__(self, file: GgufFile) -> None:
        """The roles of an open file."""
        self.files = file
        self._tensor_names = gguf_tensor_names(file.metadata, str(file.path))
        self.names = self._tensor_names.names
        self._used: set[str] = set(ROPE_FACTORS)

    @classmethod
    def open(cls, path: str | Path) -> GgufCheckpoint:
        """The checkpoint in a GGUF file; only headers are read."""
        return cls(GgufFile(path))

    def has(self, role: str) -> bool:
        """Whether the file holds this role."""
        return self.stored(role) is not None

    def stored(self, role: str) -> TensorLocation | None:
        """The location where the file holds this role."""
        return self._find(role, "weight")

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, bias included, from headers alone."""
        location = self._locate(role, fallback)
        entry = self._entry(location)
        rows = (
            num_rows(location.rows)
            or num_rows([location.expert_rows] if location.expert_rows else [])
            or entry.rows
        )
        total = entry.nbytes * rows // entry.rows
        bias = self.files.tensors.get(f"{location.key}.bias")
        if bias is not None:
            total += bias.nbytes * rows // self._outputs(location, rows)
        words = f"gguf {entry.type_name}"
        if entry.type_name in FLOAT_TYPES:
            words = f"dense {str(FLOAT_TYPES[entry.type_name]).removeprefix('torch.')}"
        return words, total

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
    ) -> torch.Tensor:
        """A float tensor that is no matrix to multiply with: a norm, an embedding, or a norm's bias.

        `shape` is the only one accepted or several of them; with `finite`, NaN or infinity in it is an error.
        """
        location = self._find(role, suffix)
        if location is None:
            raise self._missing(role, suffix)
        entry = self._use(location, suffix)
        shapes = accepted_shapes(shape)
        if entry.shape not in shapes:
            raise self._wrong_shape(entry, role, " or ".join(str(list(one)) for one in shapes))
        values = self._read_floats(entry, dtype)
        if self._tensor_names.norms_plus_one and suffix == "weight" and role_in_layer(role) in NORMS:
            values = values - 1
        if finite and not bool(values.isfinite().all()):
            raise BadTensor(
                f"{entry}: expected finite values, found NaN or infinity. Download the file again."
            )
        return values.view(entry.shape).to(device)

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

        `fallback` is the role it is tied to, taken where the file does not hold `role` itself.
        """
        location = self._locate(role, fallback)
        entry = self._use(location)
        spans = self._spans(entry, location, role, in_features, out_features)
        parts = [self.files.read_rows(entry.name, *span) for span in spans]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = self._undo_rope_interleaving(role, out_features)
        if order is not None:
            raw = raw[order]
        weight = read(raw, entry.type_name, in_features, out_features, str(entry))
        self.files.release(entry.name)
        factor = self._tensor_scale(location, role)
        if isinstance(weight, DenseWeight):
            data = weight.data if factor == 1.0 else weight.data.float() * factor
            weight = DenseWeight(_cast(data, entry, dtype))
        elif factor != 1.0:
            raise Unsupported(
                f"{entry}: {entry.type_name} with a factor for the whole of {role} cannot be read."
            )
        return self._with_bias(weight, role, location, bias, dtype).to(device)

    def _tensor_scale(self, location: TensorLocation, role: str) -> float:
        """The factor of a whole matrix, 1.0 if it has none: NVFP4 stores such a number beside it."""
        if f"{location.key}.scale" not in self.files.tensors:
            return 1.0
        entry = self._use(location, "scale")
        values = self._read_floats(entry, torch.float32).flatten()
        expert = location.expert_rows[0] // location.rows_per_expert if location.expert_rows else 0
        experts = 1 if location.expert_rows is None else self._entry(location).shape[0]
        if len(values) != experts or not bool(values.isfinite().all()):
            raise self._wrong_shape(entry, f"the factor of {role}", str([experts]))
        return float(values[expert])

    def _with_bias(
        self,
        weight: DenseWeight | PackedWeight,
        role: str,
        location: TensorLocation,
        wanted: bool,
        dtype: torch.dtype | None,
    ) -> DenseWeight | PackedWeight:
        """The weight with its bias, required if the architecture has one; else one of zeros is accepted."""
        if f"{location.key}.bias" not in self.files.tensors:
            if wanted:
                raise self._missing(role, "bias")
            return weight
        entry = self._use(location, "bias")
        n = weight.out_features
        spans = location.rows or ((0, n),)
        if entry.shape != (self._outputs(location, n),) or num_rows(spans) != n:
            raise self._wrong_shape(entry, f"the bias of {role}", str([self._outputs(location, n)]))
        values = self._read_floats(entry, dtype)[0]
        values = torch.cat([values[start:stop] for start, stop in spans])
        order = self._undo_rope_interleaving(role, n)
        if order is not None:
            values = values[order]
        if wanted:
            return replace(weight, bias=values)
        if odd := int(torch.count_nonzero(values)):
            raise BadTensor(
                f"{entry}: expected no bias for {role}, or one of zeros; found {odd} of {n} not zero. The "
                "metadata describes another architecture than these weights have."
            )
        return weight

    def _spans(
        self, entry: GgufTensor, location: TensorLocation, role: str, in_features: int, out_features: int
    ) -> tuple[RowRange, ...]:
        """The stored rows of a matrix; BadTensor if the tensor's shape is wrong."""
        if location.expert_rows is not None:
            start, stop = location.expert_rows
            experts, rows = (entry.shape[0], entry.shape[1]) if len(entry.shape) == 3 else (0, 0)
            if entry.shape != (experts, out_features, in_features) or stop > experts * rows:
                raise self._wrong_shape(entry, role, f"[experts, {out_features}, {in_features}]")
            return ((start, stop),)
        expected = (self._outputs(location, out_features), in_features)
        spans = location.rows or ((0, out_features),)
        if entry.shape != expected or num_rows(spans) != out_features:
            raise self._wrong_shape(entry, role, str(list(expected)))
        return spans

    def _outputs(self, location: TensorLocation, width: int) -> int:
        """How many outputs the stored matrix has: `width`, or the last row of any role fused into it."""
        if not location.rows:
            return width
        key = _LAYER.sub("blk.{i}.", location.key)
        fused = (one for _, locations in self.names.locations for one in locations if one.key == key)
        return max(stop for one in fused for _, stop in one.rows)

    def _undo_rope_interleaving(self, role: str, outputs: int) -> torch.Tensor | None:
        """The stored output of each of the model's outputs, where q and k are interleaved; else None."""
        if not self._tensor_names.interleaved_rope or role_in_layer(role) not in ("attn.q", "attn.k"):
            return None
        half = self._tensor_names.head_dim // 2
        if self._tensor_names.head_dim % 2 or outputs % self._tensor_names.head_dim:
            raise BadTensor(
                f"{self.files.path}: {outputs} outputs of {role} are not whole heads of "
                f"{self._tensor_names.head_dim} dimensions."
            )
        return torch.arange(outputs).view(-1, half, 2).transpose(1, 2).flatten()

    def _read_floats(self, entry: GgufTensor, dtype: torch.dtype | None) -> torch.Tensor:
        """(rows, innermost size) as floats, unpacked a few rows at a time."""
        width = entry.shape[-1]
        out = torch.empty((entry.rows, width), dtype=dtype or FLOAT_TYPES.get(entry.type_name, torch.float32))
        step = max(1, DEQUANTIZE_CHUNK // width)
        for start in range(0, entry.rows, step):
            stop = min(start + step, entry.rows)
            raw = self.files.read_rows(entry.name, start, stop)
            values = read(raw, entry.type_name, width, stop - start, str(entry)).dequantize().T
            out[start:stop] = _cast(values, entry, out.dtype)
        self.files.release(entry.name)
        return out

    def _find(self, role: str, suffix: str) -> TensorLocation | None:
        for location in self.names.locations_of(role):
            if f"{location.key}.{suffix}" in self.files.tensors:
                return location
        return None

    def _locate(self, role: str, fallback: str | None) -> TensorLocation:
        found = self.stored(role)
        if found is None and fallback is not None:
            found = self.stored(fallback)
        if found is None:
            raise self._missing(role, "weight")
        return found

    def _entry(self, location: TensorLocation, suffix: str = "weight") -> GgufTensor:
        return self.files.entry(f"{location.key}.{suffix}")

    def _use(self, location: TensorLocation, suffix: str = "weight") -> GgufTensor:
        entry = self._entry(location, suffix)
        self._used.add(entry.name)
        return entry

    def _missing(self, role: str, suffix: str) -> MissingTensor:
        keys = " or ".join(quoted(f"{location.key}.{suffix}") for location in self.names.locations_of(role))
        what = role if suffix == "weight" else f"the {suffix} of {role}"
        return MissingTensor(
            f"{self.files.path}: {what} is missing: expected {keys}, found no such name among "
            f"{len(self.files.tensors)} tensors. The file is incomplete, or its metadata is another model's."
        )

    def _wrong_shape(self, entry: GgufTensor, role: str, expected: str) -> BadTensor:
        return BadTensor(
            f"{entry}: expected shape {expected} for {role}, found {list(entry.shape)}. "
            "The metadata describes another model than these weights are."
        )


def _cast(values: torch.Tensor, entry: GgufTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy, perhaps in another precision; BadTensor if that cannot hold the values."""
    out = values.to(dtype or values.dtype, copy=True)
    if torch.finfo(out.dtype).max < torch.finfo(values.dtype).max:
        lost = int((values.isfinite() & ~out.isfinite()).sum())
        if lost:
            raise BadTensor(
                f"{entry}: {lost} of {out.numel()} values are too large for "
                f"{str(out.dtype).removeprefix('torch.')}. Compute in bfloat16 or float32 instead."
            )
    return out
