"""The weights of a GGUF file by role, as `SafetensorsCheckpoint` gives those of a folder.

The tensor names are the same for every architecture, so a family's own `TensorNames`, which are those of
folders, are not needed; widths of fused and stacked tensors come from the metadata. Matrices stay quantised
where their type allows. What llama.cpp's converter changed is undone (the interleaved rows of q and k for
RoPE, the one added to Gemma's norms), so that one description of a model fits its folder and its GGUF file.
Every shape is checked, and nothing returned shares memory with the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..formats.gguf import read
from ..formats.gguf_types import FLOAT_TYPES
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .file_access import quoted
from .gguf_file import ROPE_FACTOR_TENSORS, GgufFile, GgufTensorInfo
from .tensor_index import Shape, accepted_shapes, num_rows

DEQUANTIZE_CHUNK = 2**21
"""Values dequantised at once."""

_LAYER = re.compile(r"^blk\.\d+\.")

LAYER_PREFIX = "blk.{i}."

TENSOR_KEYS = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": LAYER_PREFIX + "attn_norm",
    "attn_post": LAYER_PREFIX + "post_attention_norm",
    "mlp_norm": LAYER_PREFIX + "ffn_norm",
    "mlp_post": LAYER_PREFIX + "post_ffw_norm",
    "attn.q": LAYER_PREFIX + "attn_q",
    "attn.k": LAYER_PREFIX + "attn_k",
    "attn.v": LAYER_PREFIX + "attn_v",
    "attn.o": LAYER_PREFIX + "attn_output",
    "attn.q_norm": LAYER_PREFIX + "attn_q_norm",
    "attn.k_norm": LAYER_PREFIX + "attn_k_norm",
    "mlp.gate": LAYER_PREFIX + "ffn_gate",
    "mlp.up": LAYER_PREFIX + "ffn_up",
    "mlp.down": LAYER_PREFIX + "ffn_down",
    "mlp.router": LAYER_PREFIX + "ffn_gate_inp",
}

NORM_ROLES = ("final_norm", "attn_norm", "attn_post", "mlp_norm", "mlp_post", "attn.q_norm", "attn.k_norm")


@dataclass(frozen=True)
class GgufTensorNames:
    """The tensor names of one model, and the converter's changes to undo."""

    names: TensorNames
    head_dim: int
    interleaved_rope: bool  # the outputs of q and k are ordered for rotary pairs (2i, 2i + 1)
    norms_plus_one: bool  # norms are stored as w + 1


def gguf_tensor_names(metadata: Mapping[str, Any], source: str) -> GgufTensorNames:
    """The tensor names of the model that the metadata describes; `source` names the file in errors."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadFile(f"{source}: expected a name as general.architecture, found {arch!r}.")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise BadFile(f"{source}: expected a number of at least 1 as {arch}.{key}, found {value!r}.")
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    table: dict[str, tuple[TensorLocation, ...]] = {role: (TensorLocation(key),) for role, key in TENSOR_KEYS.items()}
    q, kv = heads * head_dim, number("attention.head_count_kv", heads) * head_dim
    for role, span in {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}.items():
        table[f"attn.{role}"] += (TensorLocation(LAYER_PREFIX + "attn_qkv", rows=(span,)),)
    width = number("feed_forward_length", 1)
    if arch == "phi3":
        table["mlp.gate"] = (TensorLocation(LAYER_PREFIX + "ffn_up", rows=((0, width),)),)
        table["mlp.up"] = (TensorLocation(LAYER_PREFIX + "ffn_up", rows=((width, 2 * width),)),)
    expert = number("expert_feed_forward_length", width)
    for part, rows in {"gate": expert, "up": expert, "down": hidden}.items():
        stacked = TensorLocation(f"{LAYER_PREFIX}ffn_{part}_exps", rows_per_expert=rows)
        table[f"mlp.experts.{part}"] = (stacked, TensorLocation(f"{LAYER_PREFIX}ffn_{part}.{{e}}"))
    return GgufTensorNames(
        TensorNames(locations=tuple(table.items())),
        head_dim,
        interleaved_rope=arch == "llama",
        norms_plus_one=arch in ("gemma", "gemma2", "gemma3"),
    )


def role_in_layer(role: str) -> str:
    """A role without its layer: `layers.3.attn.q` → `attn.q`."""
    return role.split(".", 2)[2] if role.startswith("layers.") else role


class GgufCheckpoint:
    """The weights of one model in a GGUF file, by role."""

    def __init__(self, file: GgufFile) -> None:
        """The roles of an open file."""
        self.files = file
        self._tensor_names = gguf_tensor_names(file.metadata, str(file.path))
        self.names = self._tensor_names.names
        self._used: set[str] = set(ROPE_FACTOR_TENSORS)

    @classmethod
    def open(cls, path: str | Path) -> GgufCheckpoint:
        """The checkpoint in a GGUF file; only headers are read."""
        return cls(GgufFile(path))

    def has(self, role: str) -> bool:
        """Whether the file holds this role."""
        return self.find(role) is not None

    def find(self, role: str) -> TensorLocation | None:
        """The location where the file holds this role."""
        return self._find(role, "weight")

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, bias included, from headers alone."""
        location = self._locate(role, fallback)
        info = self._info(location)
        rows = num_rows(location.rows) or num_rows([location.expert_rows] if location.expert_rows else []) or info.rows
        total = info.nbytes * rows // info.rows
        bias = self.files.tensors.get(f"{location.key}.bias")
        if bias is not None:
            total += bias.nbytes * rows // self._outputs(location, rows)
        words = f"gguf {info.type_name}"
        if info.type_name in FLOAT_TYPES:
            words = f"dense {str(FLOAT_TYPES[info.type_name]).removeprefix('torch.')}"
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
        info = self._use(location, suffix)
        shapes = accepted_shapes(shape)
        if info.shape not in shapes:
            raise self._wrong_shape(info, role, " or ".join(str(list(one)) for one in shapes))
        values = self._read_floats(info, dtype)
        if self._tensor_names.norms_plus_one and suffix == "weight" and role_in_layer(role) in NORM_ROLES:
            values = values - 1
        if finite and not bool(values.isfinite().all()):
            raise BadTensor(f"{info}: expected finite values, found NaN or infinity. Download the file again.")
        return values.view(info.shape).to(device)

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
        info = self._use(location)
        spans = self._spans(info, location, role, in_features, out_features)
        parts = [self.files.view_rows(info.name, *span) for span in spans]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = self._undo_rope_interleaving(role, out_features)
        if order is not None:
            raw = raw[order]
        weight = read(raw, info.type_name, in_features, out_features, str(info))
        self.files.release(info.name)
        factor = self._tensor_scale(location, role)
        if isinstance(weight, DenseWeight):
            data = weight.data if factor == 1.0 else weight.data.float() * factor
            weight = DenseWeight(_cast(data, info, dtype))
        elif factor != 1.0:
            raise Unsupported(f"{info}: {info.type_name} with a factor for the whole of {role} cannot be read.")
        return self._with_bias(weight, role, location, bias, dtype).to(device)

    def _tensor_scale(self, location: TensorLocation, role: str) -> float:
        """The factor of a whole matrix, 1.0 if it has none: NVFP4 stores such a number beside it."""
        if f"{location.key}.scale" not in self.files.tensors:
            return 1.0
        info = self._use(location, "scale")
        values = self._read_floats(info, torch.float32).flatten()
        expert = location.expert_rows[0] // location.rows_per_expert if location.expert_rows else 0
        experts = 1 if location.expert_rows is None else self._info(location).shape[0]
        if len(values) != experts or not bool(values.isfinite().all()):
            raise self._wrong_shape(info, f"the factor of {role}", str([experts]))
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
        info = self._use(location, "bias")
        n = weight.out_features
        spans = location.rows or ((0, n),)
        if info.shape != (self._outputs(location, n),) or num_rows(spans) != n:
            raise self._wrong_shape(info, f"the bias of {role}", str([self._outputs(location, n)]))
        values = self._read_floats(info, dtype)[0]
        values = torch.cat([values[start:stop] for start, stop in spans])
        order = self._undo_rope_interleaving(role, n)
        if order is not None:
            values = values[order]
        if wanted:
            return replace(weight, bias=values)
        if odd := int(torch.count_nonzero(values)):
            raise BadTensor(
                f"{info}: expected no bias for {role}, or one of zeros; found {odd} of {n} not zero. The "
                "metadata describes another architecture than these weights have."
            )
        return weight

    def _spans(
        self, info: GgufTensorInfo, location: TensorLocation, role: str, in_features: int, out_features: int
    ) -> tuple[RowRange, ...]:
        """The stored rows of a matrix; BadTensor if the tensor's shape is wrong."""
        if location.expert_rows is not None:
            start, stop = location.expert_rows
            experts, rows = (info.shape[0], info.shape[1]) if len(info.shape) == 3 else (0, 0)
            if info.shape != (experts, out_features, in_features) or stop > experts * rows:
                raise self._wrong_shape(info, role, f"[experts, {out_features}, {in_features}]")
            return ((start, stop),)
        expected = (self._outputs(location, out_features), in_features)
        spans = location.rows or ((0, out_features),)
        if info.shape != expected or num_rows(spans) != out_features:
            raise self._wrong_shape(info, role, str(list(expected)))
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

    def _read_floats(self, info: GgufTensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """(rows, innermost size) as floats, unpacked a few rows at a time."""
        width = info.shape[-1]
        out = torch.empty((info.rows, width), dtype=dtype or FLOAT_TYPES.get(info.type_name, torch.float32))
        step = max(1, DEQUANTIZE_CHUNK // width)
        for start in range(0, info.rows, step):
            stop = min(start + step, info.rows)
            raw = self.files.view_rows(info.name, start, stop)
            values = read(raw, info.type_name, width, stop - start, str(info)).dequantize().T
            out[start:stop] = _cast(values, info, out.dtype)
        self.files.release(info.name)
        return out

    def _find(self, role: str, suffix: str) -> TensorLocation | None:
        for location in self.names.locations_of(role):
            if f"{location.key}.{suffix}" in self.files.tensors:
                return location
        return None

    def _locate(self, role: str, fallback: str | None) -> TensorLocation:
        found = self.find(role)
        if found is None and fallback is not None:
            found = self.find(fallback)
        if found is None:
            raise self._missing(role, "weight")
        return found

    def _info(self, location: TensorLocation, suffix: str = "weight") -> GgufTensorInfo:
        return self.files.info(f"{location.key}.{suffix}")

    def _use(self, location: TensorLocation, suffix: str = "weight") -> GgufTensorInfo:
        info = self._info(location, suffix)
        self._used.add(info.name)
        return info

    def _missing(self, role: str, suffix: str) -> MissingTensor:
        keys = " or ".join(quoted(f"{location.key}.{suffix}") for location in self.names.locations_of(role))
        what = role if suffix == "weight" else f"the {suffix} of {role}"
        return MissingTensor(
            f"{self.files.path}: {what} is missing: expected {keys}, found no such name among "
            f"{len(self.files.tensors)} tensors. The file is incomplete, or its metadata is another model's."
        )

    def _wrong_shape(self, info: GgufTensorInfo, role: str, expected: str) -> BadTensor:
        return BadTensor(
            f"{info}: expected shape {expected} for {role}, found {list(info.shape)}. "
            "The metadata describes another model than these weights are."
        )


def _cast(values: torch.Tensor, info: GgufTensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy, perhaps in another precision; BadTensor if that cannot hold the values."""
    out = values.to(dtype or values.dtype, copy=True)
    if torch.finfo(out.dtype).max < torch.finfo(values.dtype).max:
        lost = int((values.isfinite() & ~out.isfinite()).sum())
        if lost:
            raise BadTensor(
                f"{info}: {lost} of {out.numel()} values are too large for "
                f"{str(out.dtype).removeprefix('torch.')}. Compute in bfloat16 or float32 instead."
            )
    return out
