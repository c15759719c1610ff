"""Qwen 2, 3, 3 MoE and the language model of 2-VL: Llama with biased or normalised queries and keys."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import (
    LANGUAGE_MODEL_PREFIXES,
    attention,
    decoder,
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


def qwen3_5(c: ConfigReader) -> spec.Model:
    """Gated delta nets, and gated attention in every fourth layer; norms are stored less one."""
    n = norm(c, offset=1.0)
    attn = attention(c, qk_norm=spec.QkNorm(n), gated=True)
    delta = delta_net(c)
    mixers = [attn if kind == "full_attention" else delta for kind in hybrid_layer_types(c)]
    names = TensorNames(key_renames=LANGUAGE_MODEL_PREFIXES).with_locations(
        **gated_query(attn), **delta_net_locations(delta)
    )
    return decoder(c, [spec.Layer(mixer, mlp(c), n, n) for mixer in mixers], final_norm=n, names=names)


def delta_net(c: ConfigReader) -> spec.DeltaNet:
    """The gated delta net that the `linear_` keys describe."""
    key_heads, value_heads = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise c.inconsistent(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    return spec.DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=c.size("linear_key_head_dim"),
        value_dim=c.size("linear_value_head_dim"),
        conv_kernel=c.size("linear_conv_kernel_dim", default=4),
        norm_eps=norm(c).eps,
    )


def hybrid_layer_types(c: ConfigReader) -> list[str]:
    """The mixer of each layer: `layer_types`, or attention in every `full_attention_interval`-th layer."""
    depth, found = c.num_layers(), c.get("layer_types")
    if found is None:
        every = c.size("full_attention_interval", default=4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    known = ("linear_attention", "full_attention")
    if not isinstance(found, list) or len(found) != depth or not all(kind in known for kind in found):
        raise c.invalid_value("layer_types", f"a list of {depth} names, each one of {', '.join(known)}", found)
    return found


def gated_query(attn: spec.Attention) -> dict[str, TensorLocation]:
    """Locations of q and of the output gate, stored head by head in one matrix."""
    key, d = LAYER_PREFIX + "self_attn.q_proj", attn.head_dim
    starts = range(0, 2 * d * attn.heads, 2 * d)
    return {
        "attn__q": TensorLocation(key, rows=tuple((start, start + d) for start in starts)),
        "attn__gate": TensorLocation(key, rows=tuple((start + d, start + 2 * d) for start in starts)),
    }


def delta_net_locations(delta: spec.DeltaNet) -> dict[str, TensorLocation]:
    """Locations of a Qwen 3.5 delta net's tensors."""
    prefix, k, v = LAYER_PREFIX + "linear_attn.", delta.key_width, delta.value_width
    rows = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v)}
    fused = {f"delta__{part}": TensorLocation(prefix + "in_proj_qkv", rows=(span,)) for part, span in rows.items()}
    return {
        **fused,
        **{f"delta__{part}": TensorLocation(f"{prefix}in_proj_{part}") for part in "zba"},
        "delta__o": TensorLocation(prefix + "out_proj"),
        "delta__conv": TensorLocation(prefix + "conv1d"),
        "delta__norm": TensorLocation(prefix + "norm"),
        "delta__a_log": TensorLocation(prefix + "A_log", without_suffix=True),
        "delta__dt_bias": TensorLocation(prefix + "dt_bias", without_suffix=True),
    }


def qwen2_vl(c: ConfigReader) -> spec.Model:
    """The language model of Qwen2-VL and 2.5-VL: Qwen2 with M-RoPE."""
    rename = (
        KeyRename("model.language_model.", "model.", prefix_only=True),
        KeyRename("model.visual.", "visual.", prefix_only=True),
    )
    c = c.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6)
    return replace(qwen2(c), names=TensorNames(key_renames=rename))
