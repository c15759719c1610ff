"""Qwen 2, 3, 3 MoE and the language model of 2-VL: Llama with biased or normalised queries and keys."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import (
    attention,
    layer_windows,
    map_layers,
    mlp,
    moe,
    norm,
    qwen_layer_windows,
    stacked_experts,
    with_windows,
)
from .config_reader import ConfigReader
from .llama import llama

EXPERT_LOCATIONS = {
    "mlp__router": TensorLocation(LAYER_PREFIX + "mlp.gate"),
    "mlp__experts__gate": TensorLocation(LAYER_PREFIX + "mlp.experts.{e}.gate_proj"),
    "mlp__experts__up": TensorLocation(LAYER_PREFIX + "mlp.experts.{e}.up_proj"),
    "mlp__experts__down": TensorLocation(LAYER_PREFIX + "mlp.experts.{e}.down_proj"),
}


def qwen2(c: ConfigReader) -> spec.Model:
    """Llama with biased q, k and v."""
    attn = attention(c, qkv_bias=True, out_bias=False)
    model = map_layers(llama(c), lambda _, layer: replace(layer, mixer=attn))
    return with_windows(model, qwen_layer_windows(c, c.num_layers()))


def qwen3(c: ConfigReader) -> spec.Model:
    """Llama with normalised q and k heads."""
    attn = attention(c, qk_norm=spec.QkNorm(norm(c)))
    model = map_layers(llama(c), lambda _, layer: replace(layer, mixer=attn))
    return with_windows(model, qwen_layer_windows(c, c.num_layers()))


def qwen3_moe(c: ConfigReader) -> spec.Model:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    depth = c.num_layers()
    dense_layers = c.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise c.invalid_value("mlp_only_layers", "a list of layers", dense_layers)
    step = c.size("decoder_sparse_step", default=1)
    attn = attention(c, qk_norm=spec.QkNorm(norm(c)))
    experts = moe(c, width=c.size("moe_intermediate_size"), renormalize=c.flag("norm_topk_prob", default=False))

    def change(i: int, layer: spec.Layer) -> spec.Layer:
        is_moe = i not in dense_layers and (i + 1) % step == 0
        return replace(layer, mixer=attn, mlp=experts if is_moe else mlp(c))

    model = map_layers(llama(c), change)
    names = TensorNames().with_locations(**stacked_experts(EXPERT_LOCATIONS, experts.width, model.hidden))
    model = replace(model, names=names)
    use_windows = c.flag("use_sliding_window", default=False)
    return with_windows(model, layer_windows(c, depth, lambda _: True)) if use_windows else model


def qwen2_vl(c: ConfigReader) -> spec.Model:
    """The language model of Qwen2-VL and 2.5-VL: Qwen2 with M-RoPE."""
    rename = (
        KeyRename("model.language_model.", "model.", prefix_only=True),
        KeyRename("model.visual.", "visual.", prefix_only=True),
    )
    c = c.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6)
    return replace(qwen2(c), names=TensorNames(key_renames=rename))
