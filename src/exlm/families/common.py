"""Parts of the spec that nearly every family shares: attention, norm, MLP, decoder, windows, fused tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from .. import spec
from ..spec.model import Activation
from ..spec.tensor_names import LAYER_PREFIX, LLAMA_LOCATIONS, KeyRename, RowRange, TensorLocation
from .config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_SIZE, MAX_STATE, ConfigReader
from .rope import max_positions, rope

Recurrent = TypeVar("Recurrent", spec.DeltaNet, spec.Mamba2)

Locations = dict[str, TensorLocation | tuple[TensorLocation, ...]]
"""Where files hold the tensors of some roles (`TensorNames.with_locations`); of several places, the one that exists."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
assert set(ACTIVATIONS.values()) == set(get_args(Activation))

LANGUAGE_MODEL_PREFIXES = (
    KeyRename("model.language_model.", "model.", prefix_only=True),
    KeyRename("language_model.model.", "model.", prefix_only=True),
    KeyRename("language_model.lm_head.", "lm_head.", prefix_only=True),
)
"""Renames for the language model's keys in files of multimodal models."""


def attention(c: ConfigReader, **changes: Any) -> spec.Attention:
    """Llama's attention with the given fields changed; a field that is given is not looked up."""
    fields = dict(changes)
    heads = _lazy_setdefault(fields, "heads", lambda: c.size("num_attention_heads", "n_heads", "n_head"))
    head_dim = _lazy_setdefault(fields, "head_dim", lambda: resolve_head_dim(c, heads))
    kv_keys = ("num_key_value_heads", "attn_config.kv_n_heads")
    kv_heads = _lazy_setdefault(fields, "kv_heads", lambda: c.size(*kv_keys, default=heads))
    if heads % kv_heads:
        raise c.inconsistent(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
    for name in ("qkv_bias", "out_bias"):
        _lazy_setdefault(fields, name, lambda: c.flag("attention_bias", default=False))
    _lazy_setdefault(fields, "scale", lambda: head_dim**-0.5)
    _lazy_setdefault(fields, "rope", lambda: rope(c, head_dim))
    return spec.Attention(**fields)


def _lazy_setdefault(fields: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """The field, computed if it was not given."""
    if name not in fields:
        fields[name] = make()
    return fields[name]


def resolve_head_dim(c: ConfigReader, heads: int, default: int | None = None) -> int:
    """`head_dim`, or the hidden size divided by the number of heads."""
    stated = c.integer("head_dim", default=default)
    if stated is not None:
        return c.size("head_dim", default=default)
    hidden = c.size("hidden_size", "d_model", "n_embd")
    if hidden % heads:
        raise c.inconsistent(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is absent"
        )
    if hidden // heads > MAX_HEAD_DIM:
        raise c.inconsistent(
            f"hidden_size {hidden} and {heads} attention heads make heads of {hidden // heads}; "
            f"expected at most {MAX_HEAD_DIM}"
        )
    return hidden // heads


def norm(c: ConfigReader, *keys: str, **changes: Any) -> spec.Norm:
    """RMSNorm with the given fields changed; `keys` are the config.json keys of its eps in this family."""
    names = keys or ("rms_norm_eps",)
    eps = c.real(*names, default=1e-5 if keys else 1e-6)
    if eps < 0:
        raise c.invalid_value(c.find(*names)[0], "a number of at least 0", eps)
    return spec.Norm(**({"eps": eps} | changes))


def activation(c: ConfigReader, *keys: str, default: str) -> Activation:
    """The MLP's activation by the name config.json gives it."""
    name = c.text(*keys, default=default)
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    raise c.invalid_value(keys[0], f"one of {', '.join(ACTIVATIONS)}", name)


def mlp(c: ConfigReader, **changes: Any) -> spec.Mlp:
    """Llama's gated MLP with the given fields changed; a field that is given is not looked up."""
    fields = dict(changes)
    _lazy_setdefault(fields, "width", lambda: c.size("intermediate_size", "n_inner"))
    _lazy_setdefault(fields, "act", lambda: activation(c, "hidden_act", "hidden_activation", default="silu"))
    _lazy_setdefault(fields, "bias", lambda: c.flag("mlp_bias", default=False))
    return spec.Mlp(**fields)


def moe(c: ConfigReader, **changes: Any) -> spec.Moe:
    """Mixtral's experts with the given fields changed; a field that is given is not looked up."""
    fields = dict(changes)
    _lazy_setdefault(fields, "act", lambda: activation(c, "hidden_act", default="silu"))
    _lazy_setdefault(fields, "width", lambda: c.size("intermediate_size"))
    count_keys = ("num_local_experts", "num_experts", "ffn_config.moe_num_experts")
    experts = _lazy_setdefault(fields, "experts", lambda: c.size(*count_keys))
    active = _lazy_setdefault(fields, "active", lambda: c.size("num_experts_per_tok", "ffn_config.moe_top_k"))
    if active > experts:
        raise c.inconsistent(f"{active} experts for each token but only {experts} exist")
    return spec.Moe(**fields)


def expert_groups(c: ConfigReader, experts: int, active: int) -> dict[str, int]:
    """The groups that experts are selected in, as fields of `spec.Moe`."""
    groups = c.size("n_group", "num_expert_group", default=1)
    chosen = c.size("topk_group", default=1)
    if experts % groups or chosen > groups:
        raise c.inconsistent(f"{experts} experts cannot form {groups} equal groups of which {chosen} are selected")
    if active > experts // groups * chosen:
        raise c.inconsistent(f"{active} experts for each token but {chosen} of {groups} groups hold fewer")
    return {"routing_groups": groups, "active_groups": chosen}


def layer_windows(c: ConfigReader, depth: int, is_windowed: Callable[[int], bool]) -> list[int | None]:
    """The sliding window of each layer: by `layer_types` if the file has it, else by `is_windowed(layer)`."""
    size = c.integer("sliding_window", "sliding_window_size", default=None)
    if not size:
        return [None] * depth
    if not 0 < size < MAX_SIZE:
        raise c.invalid_value("sliding_window", f"a number of tokens below {MAX_SIZE}, or null for no window", size)
    layer_types = c.get("layer_types")
    if layer_types is None:
        return [size if is_windowed(i) else None for i in range(depth)]
    known = {"sliding_attention", "full_attention"}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != depth
        or not all(isinstance(k, str) for k in layer_types)
    ):
        raise c.invalid_value("layer_types", f"a list of {depth} names", layer_types)
    if set(layer_types) - known:
        raise c.invalid_value("layer_types", " or ".join(sorted(known)), sorted(set(layer_types) - known))
    return [size if kind == "sliding_attention" else None for kind in layer_types]


def qwen_layer_windows(c: ConfigReader, depth: int) -> list[int | None]:
    """Qwen's windows: none unless `use_sliding_window`; with it, in the layers from `max_window_layers` on."""
    if not c.flag("use_sliding_window", default=False):
        return [None] * depth
    first = c.integer("max_window_layers", default=28)
    return layer_windows(c, depth, lambda i: i >= first)


def required_value(c: ConfigReader, key: str, value: str | int) -> None:
    """Raise unless a key is absent or has the one value that is supported."""
    found = c.get(key)
    if found is not None and found != value:
        raise c.invalid_value(key, f"{value!r}, the only one known for this architecture", found)


def layer_kinds(c: ConfigReader, depth: int, kinds: Mapping[str, str], *keys: str) -> list[str] | None:
    """The kind of each layer, from a list of names under one of these keys; None if the file has none.

    `kinds` maps the names that files use to the kinds they mean.
    """
    key, found = c.find(*keys)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(name, str) and name in kinds for name in found):
        odd = [name for name in found if name not in list(kinds)] if isinstance(found, list) else found
        raise c.invalid_value(key, f"a list of names, each one of {', '.join(kinds)}", odd)
    if len(found) != depth:
        raise c.inconsistent(f"{key} names {len(found)} layers and the model has {depth}")
    return [kinds[name] for name in found]


def layer_numbers(c: ConfigReader, key: str, depth: int, *, first: int = 0) -> set[int]:
    """The layers that a list under a key names, counted from 0; the file counts from `first`."""
    found = c.get(key)
    if found is None:
        return set()
    if not isinstance(found, list) or not all(type(n) is int and first <= n < first + depth for n in found):
        raise c.invalid_value(key, f"a list of layers from {first} to {first + depth - 1}", found)
    return {n - first for n in found}


def limited_state(c: ConfigReader, mixer: Recurrent) -> Recurrent:
    """The mixer, if its recurrent state is small enough to allocate."""
    size = math.prod(mixer.state.matrix or ())
    if size > MAX_STATE:
        raise c.inconsistent(f"the recurrent state of a layer has {size} numbers; expected at most {MAX_STATE}")
    return mixer


def map_layers(model: spec.Model, change: Callable[[int, spec.Layer], spec.Layer]) -> spec.Model:
    """The model with every layer changed."""
    return replace(model, layers=tuple(change(i, layer) for i, layer in enumerate(model.layers)))


def with_windows(model: spec.Model, sizes: list[int | None]) -> spec.Model:
    """The model with a sliding window in each layer's attention."""
    return map_layers(model, lambda i, layer: layer.with_attention(lambda attn: replace(attn, window=sizes[i])))


def decoder(c: ConfigReader, layers: Iterable[spec.Layer], **changes: Any) -> spec.Model:
    """A decoder of these layers, with the multipliers and softcaps of config.json."""
    scale = c.real("embedding_multiplier", "scale_emb", default=1.0)
    logit_scale = c.real("logit_scale", default=1.0) / c.positive("logits_scaling", default=1.0)
    tied = changes.pop("tied", False)
    _lazy_setdefault(changes, "vocab", lambda: c.size("vocab_size"))
    _lazy_setdefault(changes, "final_norm", lambda: norm(c))
    fields: dict[str, Any] = {
        "architecture": c.architecture,
        "hidden": c.size("hidden_size", "d_model", "n_embd"),
        "layers": tuple(layers),
        "max_positions": max_positions(c),
        "embed": spec.Embed(scale=scale),
        "draft_layers": num_draft_layers(c),
        "head": spec.Head(
            tied=c.top_level_flag("tie_word_embeddings", default=tied),
            scale=logit_scale,
            softcap=c.positive("final_logit_softcapping", default=None),
            normalize_rows=bool(c.get("norm_head")),
        ),
    }
    return spec.Model(**(fields | changes))


def num_draft_layers(c: ConfigReader) -> int:
    """Layers for multi-token prediction, stored after the model's own."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    count: int = c.integer(*keys, default=0)
    if not 0 <= count <= MAX_LAYERS:
        raise c.invalid_value(c.find(*keys)[0], f"a number of layers from 0 to {MAX_LAYERS}", count)
    return count


def fused_qkv(attn: spec.Attention, key: str, *, transposed: bool = False) -> dict[str, tuple[TensorLocation, ...]]:
    """Locations of q, k and v: separate, or one after the other in `key`."""
    q, kv = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    rows = {"attn.q": ((0, q),), "attn.k": ((q, q + kv),), "attn.v": ((q + kv, q + 2 * kv),)}
    return _separate_or_fused(key, rows, transposed=transposed)


def fused_gate_up(width: int, key: str = "mlp.gate_up_proj") -> dict[str, tuple[TensorLocation, ...]]:
    """Locations of gate and up: separate, or one after the other in `key`."""
    return _separate_or_fused(key, {"mlp.gate": ((0, width),), "mlp.up": ((width, 2 * width),)})


def interleaved_qkv(attn: spec.Attention, key: str) -> dict[str, tuple[TensorLocation, ...]]:
    """Locations of q, k and v interleaved by KV head: its query heads, its key, its value, and so on."""
    d, share = attn.head_dim, attn.heads // attn.kv_heads
    starts = [head * (share + 2) * d for head in range(attn.kv_heads)]

    def rows(first: int, count: int) -> tuple[RowRange, ...]:
        return tuple((start + first * d, start + (first + count) * d) for start in starts)

    return _separate_or_fused(key, {"attn.q": rows(0, share), "attn.k": rows(share, 1), "attn.v": rows(share + 1, 1)})


def _separate_or_fused(
    key: str, rows: Mapping[str, tuple[RowRange, ...]], *, transposed: bool = False
) -> dict[str, tuple[TensorLocation, ...]]:
    """Locations of roles: Llama's, or these rows of each layer's `key`."""
    separate = dict(LLAMA_LOCATIONS)
    return {
        role.replace(".", "__"): (
            *separate[role],
            TensorLocation(LAYER_PREFIX + key, rows=spans, transposed=transposed),
        )
        for role, spans in rows.items()
    }


def stacked_experts(
    separate: Mapping[str, TensorLocation], width: int, hidden: int, prefix: str = "mlp."
) -> dict[str, tuple[TensorLocation, ...]]:
    """Locations of router and experts: separate, or stacked in two tensors a layer (transformers 5)."""
    prefix = LAYER_PREFIX + prefix
    gate_up_key, down_key = prefix + "experts.gate_up_proj", prefix + "experts.down_proj"
    stacked = {
        "mlp__router": TensorLocation(prefix + "gate"),
        "mlp__experts__gate": TensorLocation(
            gate_up_key, rows=((0, width),), rows_per_expert=2 * width, without_suffix=True
        ),
        "mlp__experts__up": TensorLocation(
            gate_up_key, rows=((width, 2 * width),), rows_per_expert=2 * width, without_suffix=True
        ),
        "mlp__experts__down": TensorLocation(down_key, rows_per_expert=hidden, without_suffix=True),
    }
    return {role: tuple(dict.fromkeys((location, stacked[role]))) for role, location in separate.items()}
