"""The weights of a GGUF file by role, as `SafetensorsCheckpoint` gives those of a folder.

The tensor names are the same for every architecture, so a family's own `TensorNames`, which are those of
folders, are not needed; widths of fused and stacked tensors come from the metadata. Matrices stay quantised
where their type allows. What llama.cpp's converter changed is undone (the interleaved rows of q and k for
RoPE, the one added to Gemma's norms), so that one description of a model fits its folder and its GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadFile, BadTensor, Unsupported
from ..formats import DenseWeight, PackedWeight
from ..formats.gguf import FLOAT_TYPES, read
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames
from .gguf_file import ROPE_FACTOR_TENSORS, GgufFile, num_stored_rows
from .source import CastErrors, Checkpoint, MatrixRequest, Shape, num_rows
from .tensor_files import TensorInfo

DEQUANTIZE_CHUNK = 2**21
"""Values dequantised at once."""

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
class GgufConversion:
    """What llama.cpp's converter made of a model: the tensor names, and changes that are undone."""

    names: TensorNames
    head_dim: int
    interleaved_rope: bool  # the outputs of q and k are ordered for rotary pairs (2i, 2i + 1)
    norms_plus_one: bool  # norms are stored with Gemma's offset of one already added (`spec.Norm.offset`)


def gguf_conversion(metadata: Mapping[str, Any], source: str) -> GgufConversion:
    """The conversion of the model that the metadata describes; `source` names the file in errors."""
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
    return GgufConversion(
        TensorNames(locations=tuple(table.items())),
        head_dim,
        interleaved_rope=arch == "llama",
        norms_plus_one=arch in ("gemma", "gemma2", "gemma3"),
    )


def role_in_layer(role: str) -> str:
    """A role without its layer: `layers.3.attn.q` → `attn.q`."""
    return role.split(".", 2)[2] if role.startswith("layers.") else role


class GgufCheckpoint(Checkpoint):
    """The weights of one model in a GGUF file, by role."""

    description_source = "The metadata"
    files: GgufFile

    def __init__(self, file: GgufFile) -> None:
        self._conversion = gguf_conversion(file.metadata, str(file.path))
        super().__init__(file, self._conversion.names, ("weight",))
        self._used |= set(ROPE_FACTOR_TENSORS)

    @classmethod
    def open(cls, path: str | Path) -> GgufCheckpoint:
        """The checkpoint in a GGUF file; only headers are read."""
        return cls(GgufFile(path))

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored type in a few words and its stored bytes, bias included, from headers alone."""
        location, suffix = self._locate(role, fallback)
        info = self._info(location.tensor_key(suffix))
        stored = num_stored_rows(info)
        spans = location.rows or (location.expert_rows or (0, stored),)
        rows = num_rows(spans)
        total = info.nbytes * rows // stored
        if f"{location.key}.bias" in self.names_by_key:
            bias = self._info(f"{location.key}.bias")
            total += bias.nbytes * rows // self._stored_outputs(role, location, rows)
        words = f"gguf {info.dtype}"
        if info.dtype in FLOAT_TYPES:
            words = f"dense {str(FLOAT_TYPES[info.dtype]).removeprefix('torch.')}"
        return words, total

    def _read_matrix(self, request: MatrixRequest) -> DenseWeight | PackedWeight:
        role, location = request.role, request.location
        info = self._use(location.tensor_key(request.suffix))
        parts = [self.files.view_rows(info.name, *span) for span in self._spans(info, request)]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts)
        if (order := self._interleaved_order(role, request.out_features)) is not None:
            raw = raw[order]
        weight = read(raw, info.dtype, request.in_features, request.out_features, str(info))
        self.files.release(info.name)
        scale = self._tensor_scale(location, role)
        if isinstance(weight, DenseWeight):
            data = weight.data if scale == 1.0 else weight.data.float() * scale
            copied, errors = torch.empty_like(data, dtype=request.dtype or data.dtype), CastErrors()
            errors.copy(data, copied)
            errors.check(info, copied)
            weight = DenseWeight(copied)
        elif scale != 1.0:
            raise Unsupported(f"{info}: {info.dtype} with a factor for the whole of {role} cannot be read.")
        return weight.to(request.device)

    def _tensor_scale(self, location: TensorLocation, role: str) -> float:
        """The scale of a whole tensor, which NVFP4 stores beside it; 1.0 if there is none."""
        if f"{location.key}.scale" not in self.names_by_key:
            return 1.0
        info = self._use(f"{location.key}.scale")
        values = self._dequantize(info, torch.float32, CastErrors()).flatten()
        expert = location.expert_rows[0] // location.rows_per_expert if location.expert_rows else 0
        experts = 1 if location.expert_rows is None else self._info(f"{location.key}.weight").shape[0]
        if len(values) != experts or not bool(values.isfinite().all()):
            raise self._wrong_shape(info, f"the factor of {role}", str([experts]))
        return float(values[expert])

    def _spans(self, info: TensorInfo, request: MatrixRequest) -> tuple[RowRange, ...]:
        """The stored rows of a matrix; BadTensor if the tensor's shape is wrong."""
        role, location, k, n = request.role, request.location, request.in_features, request.out_features
        if location.expert_rows is not None:
            if info.shape[1:] != (n, k) or location.expert_rows[1] > num_stored_rows(info):
                raise self._wrong_shape(info, role, f"[experts, {n}, {k}]")
            return (location.expert_rows,)
        expected = (self._stored_outputs(role, location, n), k)
        spans = location.rows or ((0, n),)
        if info.shape != expected or num_rows(spans) != n:
            raise self._wrong_shape(info, role, str(list(expected)))
        return spans

    def _interleaved_order(self, role: str, outputs: int) -> Tensor | None:
        """The stored output of each of the model's outputs, where q and k are interleaved; else None."""
        head_dim = self._conversion.head_dim
        if not self._conversion.interleaved_rope or role_in_layer(role) not in ("attn.q", "attn.k"):
            return None
        if head_dim % 2 or outputs % head_dim:
            raise BadTensor(
                f"{self.files.path}: {outputs} outputs of {role} are not whole heads of {head_dim} dimensions."
            )
        return torch.arange(outputs).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()

    def _undo_conversion(self, role: str, suffix: str, values: Tensor) -> Tensor:
        if suffix == "weight" and self._conversion.norms_plus_one and role_in_layer(role) in NORM_ROLES:
            return values - 1
        if suffix == "bias" and (order := self._interleaved_order(role, len(values))) is not None:
            return values[order.to(values.device)]
        return values

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
        errors = CastErrors()
        values = self._dequantize(info, dtype or FLOAT_TYPES.get(info.dtype, torch.float32), errors, check=finite)
        errors.check(info, values, finite=finite)
        if num_rows(spans) < len(values):
            values = torch.cat([values[start:stop] for start, stop in spans])
        return values.view(shape).to(device)

    def _dequantize(self, info: TensorInfo, dtype: torch.dtype, errors: CastErrors, *, check: bool = False) -> Tensor:
        """All of a tensor as floats, a few rows at a time."""
        rows, width = num_stored_rows(info), info.shape[-1]
        out = torch.empty((rows, width), dtype=dtype)
        step = max(1, DEQUANTIZE_CHUNK // width)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            raw = self.files.view_rows(info.name, start, stop)
            values = read(raw, info.dtype, width, stop - start, str(info)).dequantize().T
            errors.copy(values, out[start:stop], check=check)
        self.files.release(info.name)
        return out.view(info.shape)
