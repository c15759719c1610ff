"""The weights of a GGUF file by role, as `SafetensorsCheckpoint` gives those of a folder.

The tensor names are the same for every architecture, so a family's own `TensorNames`, which are those of
folders, are not needed; widths of fused and stacked tensors come from the metadata. Matrices stay quantised
where their type allows. What llama.cpp's converter changed is undone (the interleaved rows of q and k for
RoPE, the one added to Gemma's norms, the logarithm taken from decays, the order of value heads), so that one
description of a model fits its folder and its GGUF file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadFile, BadTensor, Unsupported
from ..formats import DenseWeight, PackedWeight
from ..formats.gguf import FLOAT_TYPES, read
from ..spec.tensor_names import RowRange, TensorLocation, TensorNames, interleaved_rows
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
    "mlp.shared.gate": LAYER_PREFIX + "ffn_gate_shexp",
    "mlp.shared.up": LAYER_PREFIX + "ffn_up_shexp",
    "mlp.shared.down": LAYER_PREFIX + "ffn_down_shexp",
    "mlp.shared_gate": LAYER_PREFIX + "ffn_gate_inp_shexp",
    "mlp.latent_down": LAYER_PREFIX + "ffn_latent_down",
    "mlp.latent_up": LAYER_PREFIX + "ffn_latent_up",
    "mamba.in": LAYER_PREFIX + "ssm_in",
    "mamba.out": LAYER_PREFIX + "ssm_out",
    "mamba.conv": LAYER_PREFIX + "ssm_conv1d",
    "mamba.norm": LAYER_PREFIX + "ssm_norm",
    "conv.in": LAYER_PREFIX + "shortconv.in_proj",
    "conv.out": LAYER_PREFIX + "shortconv.out_proj",
    "conv.conv": LAYER_PREFIX + "shortconv.conv",
    "delta.z": LAYER_PREFIX + "attn_gate",
    "delta.a": LAYER_PREFIX + "ssm_alpha",
    "delta.b": LAYER_PREFIX + "ssm_beta",
    "delta.o": LAYER_PREFIX + "ssm_out",
    "delta.conv": LAYER_PREFIX + "ssm_conv1d",
    "delta.q_conv": LAYER_PREFIX + "ssm_conv1d_q",
    "delta.k_conv": LAYER_PREFIX + "ssm_conv1d_k",
    "delta.v_conv": LAYER_PREFIX + "ssm_conv1d_v",
    "delta.norm": LAYER_PREFIX + "ssm_norm",
}

BARE_KEYS = {
    "mlp.selection_bias": LAYER_PREFIX + "exp_probs_b.bias",
    "mamba.a_log": LAYER_PREFIX + "ssm_a",
    "mamba.d": LAYER_PREFIX + "ssm_d",
    "mamba.dt_bias": LAYER_PREFIX + "ssm_dt.bias",
    "delta.a_log": LAYER_PREFIX + "ssm_a",
    "delta.dt_bias": LAYER_PREFIX + "ssm_dt.bias",
}
"""Tensors whose name has no suffix, or another than their role expects."""

KIMI_KEYS = {
    "attn.q_down": "attn_q_a",
    "attn.q_latent_norm": "attn_q_a_norm",
    "attn.q_up": "attn_q_b",
    "attn.kv_down": "attn_kv_a_mqa",
    "attn.kv_latent_norm": "attn_kv_a_norm",
    "delta.q": "attn_q",
    "delta.k": "attn_k",
    "delta.v": "attn_v",
    "delta.a_down": "ssm_f_a",
    "delta.a_up": "ssm_f_b",
    "delta.z_down": "ssm_g_a",
    "delta.z_up": "ssm_g_b",
    "delta.o": "attn_output",
}
"""Kimi Linear's own names, and those of attention that its recurrent layers have too."""

TRANSPOSED_KEY = "attn_k_b"
"""Kimi's key part of kv_b, stored (heads, latent, key) for a product from the other side."""

RESHAPED_ROLES = (
    *("mamba.conv", "mamba.norm", "mamba.a_log", "mamba.d", "delta.a_log"),
    *("delta.conv", "delta.q_conv", "delta.k_conv", "delta.v_conv", "conv.conv"),
)
"""Tensors stored with dimensions of one added or removed, or cut into groups."""

MAX_HEADS = 2**16
"""Heads whose rows are listed one by one; the description of the model allows fewer."""

Table = dict[str, tuple[TensorLocation, ...]]

NORM_ROLES = ("final_norm", "attn_norm", "attn_post", "mlp_norm", "mlp_post", "attn.q_norm", "attn.k_norm")


@dataclass(frozen=True)
class GgufConversion:
    """What llama.cpp's converter made of a model: the tensor names, and changes that are undone."""

    names: TensorNames
    head_dim: int
    interleaved_rope: bool  # the outputs of q and k are ordered for rotary pairs (2i, 2i + 1)
    norms_plus_one: bool  # norms are stored with Gemma's offset of one already added (`spec.Norm.offset`)
    value_heads: ValueHeads | None = None  # the delta nets' value heads are in another order


@dataclass(frozen=True)
class ValueHeads:
    """The value heads of Qwen 3.5's delta nets: the converter stores the first of each key head, then the second.

    The model has all value heads of a key head side by side.
    """

    key_heads: int
    share: int  # value heads of a key head
    key_dim: int
    value_dim: int

    def order(self, role: str) -> Tensor | None:
        """The stored row of each of the model's rows of a tensor; for `delta.o`, the stored input of each input."""
        heads = torch.arange(self.key_heads * self.share).view(self.share, self.key_heads).T.reshape(-1, 1)
        values = (heads * self.value_dim + torch.arange(self.value_dim)).flatten()
        match role_in_layer(role):
            case "delta.v" | "delta.z" | "delta.o":
                return values
            case "delta.a" | "delta.b" | "delta.a_log" | "delta.dt_bias":
                return heads.flatten()
            case "delta.conv":
                first = 2 * self.key_heads * self.key_dim
                return torch.cat((torch.arange(first), values + first))
        return None


def gguf_conversion(metadata: Mapping[str, Any], source: str) -> GgufConversion:
    """The conversion of the model that the metadata describes; `source` names the file in errors."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadFile(f"{source}: expected a name as general.architecture, found {arch!r}.")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list):  # one for each layer, 0 in layers without that part
            sizes = [size for size in value if size != 0]
            if sizes.count(sizes[0] if sizes else None) == len(sizes):
                value = sizes[0] if sizes else default
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
    down = number("moe_latent_size", hidden)
    for part, rows in {"gate": expert, "up": expert, "down": down}.items():
        stacked = TensorLocation(f"{LAYER_PREFIX}ffn_{part}_exps", rows_per_expert=rows)
        table[f"mlp.experts.{part}"] = (stacked, TensorLocation(f"{LAYER_PREFIX}ffn_{part}.{{e}}"))
    for part, span in {"gate": (0, expert), "up": (expert, 2 * expert)}.items():
        fused = TensorLocation(LAYER_PREFIX + "ffn_gate_up_exps", rows=(span,), rows_per_expert=2 * expert)
        table[f"mlp.experts.{part}"] += (fused,)
    table |= {role: (TensorLocation(key, without_suffix=True),) for role, key in BARE_KEYS.items()}
    bare_bias = TensorLocation(LAYER_PREFIX + "exp_probs_b", without_suffix=True)
    table["mlp.selection_bias"] += (bare_bias,)
    value_heads = None
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        sizes = [number(f"ssm.{key}") for key in ("group_count", "time_step_rank", "state_size", "inner_size")]
        if max(heads, *sizes[:2]) > MAX_HEADS or sizes[1] % sizes[0] or sizes[3] % sizes[1]:
            raise BadFile(
                f"{source}: expected {arch}.ssm.group_count to divide time_step_rank, and that inner_size, with at "
                f"most {MAX_HEADS} heads; found {sizes[0]}, {sizes[1]} and {sizes[3]}."
            )
        value_heads = ValueHeads(sizes[0], sizes[1] // sizes[0], sizes[2], sizes[3] // sizes[1])
        table |= _qwen_hybrid_locations(value_heads, heads, head_dim)
    if arch == "kimi-linear":
        if heads > MAX_HEADS:
            raise BadFile(f"{source}: expected at most {MAX_HEADS} as {arch}.attention.head_count, found {heads}.")
        nope = number("attention.key_length_mla") - number("rope.dimension_count")
        table |= _kimi_locations(heads, nope, number("attention.value_length_mla"))
    if arch in ("nemotron_h", "nemotron_h_moe"):
        table["mlp_norm"] = table["attn_norm"]
    if arch == "falcon-h1":
        table["mlp_norm"] += (TensorLocation(LAYER_PREFIX + "ffn_norm", without_suffix=True),)
    if arch in ("lfm2", "lfm2moe"):
        table["final_norm"] += (TensorLocation("token_embd_norm"),)
    return GgufConversion(
        TensorNames(locations=tuple(table.items())),
        head_dim,
        interleaved_rope=arch in ("llama", "granitehybrid", "nemotron_h", "nemotron_h_moe"),
        norms_plus_one=arch in ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"),
        value_heads=None if arch == "qwen3next" else value_heads,
    )


def _qwen_hybrid_locations(v: ValueHeads, heads: int, head_dim: int) -> Table:
    """Qwen3-Next and 3.5: q with its gate, and the delta nets' fused matrices; the oldest files fuse z as well."""
    k, values = v.key_heads * v.key_dim, v.share * v.value_dim
    table: Table = {"mlp_norm": (TensorLocation(LAYER_PREFIX + "post_attention_norm"),)}
    for role in ("attn.k", "attn.v"):  # in these files attn_qkv is of the delta nets
        table[role] = (TensorLocation(TENSOR_KEYS[role]),)
    for part, rows in interleaved_rows({"q": head_dim, "gate": head_dim}, heads).items():
        table[f"attn.{part}"] = (TensorLocation(LAYER_PREFIX + "attn_q", rows=rows),)
    whole = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v.key_heads * values)}
    for part, span in whole.items():
        table[f"delta.{part}"] = (TensorLocation(LAYER_PREFIX + "attn_qkv", rows=(span,)),)
    table["delta.z"] = (TensorLocation(LAYER_PREFIX + "attn_gate"),)
    for part, rows in interleaved_rows({"q": v.key_dim, "k": v.key_dim, "v": values, "z": values}, v.key_heads).items():
        table[f"delta.{part}"] += (TensorLocation(LAYER_PREFIX + "ssm_in", rows=rows),)
    for (part, rows), key in zip(
        interleaved_rows({"b": v.share, "a": v.share}, v.key_heads).items(), ("ssm_beta", "ssm_alpha"), strict=True
    ):
        table[f"delta.{part}"] = (
            TensorLocation(LAYER_PREFIX + key),
            TensorLocation(LAYER_PREFIX + "ssm_ba", rows=rows),
        )
    return table


def _kimi_locations(heads: int, nope_dim: int, value_dim: int) -> Table:
    """Kimi Linear: kv_b is one matrix, or cut into k_b and v_b."""
    table: Table = {role: (TensorLocation(LAYER_PREFIX + key),) for role, key in KIMI_KEYS.items()}
    for part, rows in interleaved_rows({"k": nope_dim, "v": value_dim}, heads).items():
        table[f"attn.{part}_up"] = (
            TensorLocation(f"{LAYER_PREFIX}attn_{part}_b"),
            TensorLocation(LAYER_PREFIX + "attn_kv_b", rows=rows),
        )
    return table


def role_in_layer(role: str) -> str:
    """A role without its layer: `layers.3.attn.q` → `attn.q`."""
    return role.split(".", 2)[2] if role.startswith("layers.") else role


def _first_shape(shape: Shape | tuple[Shape, ...]) -> Shape:
    """The only shape that is accepted, or the first of several."""
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes or next(one for one in shape if isinstance(one, tuple))


class GgufCheckpoint(Checkpoint):
    """The weights of one model in a GGUF file, by role."""

    description_source = "The metadata"
    files: GgufFile

    def __init__(self, path: str | Path) -> None:
        """Read the header only."""
        file = GgufFile(path)
        self._conversion = gguf_conversion(file.metadata, str(file.path))
        super().__init__(file, self._conversion.names, ("weight",))
        self._used |= set(ROPE_FACTOR_TENSORS)

    def _interpretation(self) -> object:
        return self._conversion

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
        if location.key.endswith(TRANSPOSED_KEY):
            return self._read_transposed(info, request)
        parts = [self.files.view_rows(info.name, *span) for span in self._spans(info, request)]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts)
        if (order := self._output_order(role, request.out_features)) is not None:
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
        return self._with_model_inputs(role, weight).to(request.device)

    def _read_transposed(self, info: TensorInfo, request: MatrixRequest) -> DenseWeight:
        """A matrix stored (heads, inputs, outputs of a head)."""
        inputs, outputs = request.in_features, request.out_features
        if len(info.shape) != 3 or info.shape[1] != inputs or info.shape[0] * info.shape[2] != outputs:
            raise self._wrong_shape(info, request.role, f"[heads, {inputs}, {outputs} / heads]")
        dtype, errors = request.dtype or FLOAT_TYPES.get(info.dtype, torch.float16), CastErrors()
        values = self._dequantize(info, dtype, errors)
        errors.check(info, values)
        return DenseWeight(values.transpose(1, 2).reshape(outputs, inputs)).to(request.device)

    def _with_model_inputs(self, role: str, weight: DenseWeight | PackedWeight) -> DenseWeight | PackedWeight:
        """The matrix with its inputs in the model's order: reordered, or with a permutation if it is packed."""
        heads = self._conversion.value_heads
        if heads is None or role_in_layer(role) != "delta.o" or (order := heads.order(role)) is None:
            return weight
        if len(order) != weight.in_features:
            raise BadTensor(f"{self.files.path}: {role} has {weight.in_features} inputs, expected {len(order)}.")
        if isinstance(weight, DenseWeight):
            return DenseWeight(weight.data[:, order], weight.bias)
        return replace(weight, perm=order.argsort().to(torch.int32))

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
            first, last = location.expert_rows
            if info.shape[1:] != (location.rows_per_expert, k) or last > num_stored_rows(info):
                raise self._wrong_shape(info, role, f"[experts, {location.rows_per_expert}, {k}]")
            spans = tuple((first + start, first + stop) for start, stop in location.rows) or ((first, last),)
            if num_rows(spans) != n:
                raise self._wrong_shape(info, role, f"[experts, {n}, {k}]")
            return spans
        expected = (self._stored_outputs(role, location, n), k)
        spans = location.rows or ((0, n),)
        if role_in_layer(role) in ("attn.v_up", "mlp.shared_gate") and info.shape[-1] == k:
            expected = (num_stored_rows(info), k)  # stored with a dimension for heads, or as a vector
        elif info.shape != expected:
            raise self._wrong_shape(info, role, str(list(expected)))
        if num_rows(spans) != n or max(stop for _, stop in spans) > expected[0]:
            raise self._wrong_shape(info, role, str([n, k]))
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

    def _output_order(self, role: str, outputs: int) -> Tensor | None:
        """The stored output of each of the model's outputs, where they are in another order; else None."""
        heads = self._conversion.value_heads
        order = None if heads is None or role_in_layer(role) == "delta.o" else heads.order(role)
        if order is None:
            return self._interleaved_order(role, outputs)
        if len(order) != outputs:
            raise BadTensor(f"{self.files.path}: {role} has {outputs} rows, expected {len(order)}.")
        return order

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
        values = super().tensor(
            role, self._stored_shape(role, suffix, shape), dtype=dtype, device=device, suffix=suffix, finite=finite
        )
        if suffix == "weight" and role_in_layer(role) in RESHAPED_ROLES:
            values = values.view(_first_shape(shape))
        if suffix == "weight" and (order := self._output_order(role, len(values))) is not None:
            values = values[order.to(values.device)]
        return values

    def _stored_shape(self, role: str, suffix: str, shape: Shape | tuple[Shape, ...]) -> Shape | tuple[Shape, ...]:
        """The shape as stored, of a tensor that may have others with as many numbers in the same order."""
        found = self.find(role)
        if suffix != "weight" or role_in_layer(role) not in RESHAPED_ROLES or found is None:
            return shape
        stored = self._info(found.tensor_key("weight")).shape
        return stored if math.prod(stored) == math.prod(_first_shape(shape)) else shape

    def _undo_conversion(self, role: str, suffix: str, values: Tensor) -> Tensor:
        if suffix == "weight" and role_in_layer(role) in ("mamba.a_log", "delta.a_log"):
            if bool((values > 0).any()):
                raise BadTensor(f"{self.files.path}: {role} must be stored as negative decays, found {values.max()}.")
            return (-values).log()
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
