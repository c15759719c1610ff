"""LFM2: gated short convolutions, attention in some layers, and in LFM2-MoE experts after the first layers."""

from __future__ import annotations

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from .common import attention, decoder, layer_kinds, layer_numbers, mlp, moe, norm, stacked_experts
from .config_reader import MAX_SIZE, ConfigReader

LAYER_KINDS = {"conv": "conv", "full_attention": "full_attention", "attention": "full_attention"}

FEED_FORWARD = LAYER_PREFIX + "feed_forward."

NAMES = TensorNames().with_locations(
    final_norm=TensorLocation("model.embedding_norm"),
    attn_norm=TensorLocation(LAYER_PREFIX + "operator_norm"),
    mlp_norm=TensorLocation(LAYER_PREFIX + "ffn_norm"),
    attn__o=TensorLocation(LAYER_PREFIX + "self_attn.out_proj"),
    attn__q_norm=TensorLocation(LAYER_PREFIX + "self_attn.q_layernorm"),
    attn__k_norm=TensorLocation(LAYER_PREFIX + "self_attn.k_layernorm"),
    conv__in=TensorLocation(LAYER_PREFIX + "conv.in_proj"),
    conv__out=TensorLocation(LAYER_PREFIX + "conv.out_proj"),
    conv__conv=TensorLocation(LAYER_PREFIX + "conv.conv"),
    mlp__gate=TensorLocation(FEED_FORWARD + "w1"),
    mlp__up=TensorLocation(FEED_FORWARD + "w3"),
    mlp__down=TensorLocation(FEED_FORWARD + "w2"),
)

EXPERT_LOCATIONS = {
    "mlp__router": TensorLocation(FEED_FORWARD + "gate"),
    "mlp__experts__gate": TensorLocation(FEED_FORWARD + "experts.{e}.w1"),
    "mlp__experts__up": TensorLocation(FEED_FORWARD + "experts.{e}.w3"),
    "mlp__experts__down": TensorLocation(FEED_FORWARD + "experts.{e}.w2"),
}


def lfm2(c: ConfigReader) -> spec.Model:
    """Short convolutions and attention; the MLP's width follows from `intermediate_size` by a rule."""
    depth = c.num_layers()
    gated_mlp = mlp(c, width=adjusted_width(c), act="silu", bias=False)
    kinds = layer_kinds(c, depth, LAYER_KINDS, "layer_types")
    if kinds is None:
        attended = set(range(depth))
        if c.get("full_attn_idxs") is not None:
            attended = layer_numbers(c, "full_attn_idxs", depth)
        kinds = ["full_attention" if i in attended else "conv" for i in range(depth)]
    return short_conv_decoder(c, kinds, [gated_mlp] * depth, NAMES)


def lfm2_moe(c: ConfigReader) -> spec.Model:
    """LFM2 with experts scored by a sigmoid in all but the first `num_dense_layers` layers."""
    depth = c.num_layers()
    kinds = layer_kinds(c, depth, LAYER_KINDS, "layer_types")
    if kinds is None:
        raise c.invalid_value("layer_types", f"a list of {depth} names, each one of {', '.join(LAYER_KINDS)}", None)
    has_bias = c.flag("use_expert_bias", default=True)
    experts = moe(
        c,
        width=c.size("moe_intermediate_size"),
        act="silu",
        renormalize=c.flag("norm_topk_prob", default=True),
        routing="sigmoid",
        selection_bias=has_bias,
        weight_scale=c.positive("routed_scaling_factor", default=1.0),
    )
    dense: int = c.integer("num_dense_layers", default=2)
    gated_mlp = mlp(c, act="silu", bias=False)
    names = NAMES.with_locations(
        **stacked_experts(EXPERT_LOCATIONS, experts.width, c.size("hidden_size"), "feed_forward."),
        mlp__selection_bias=TensorLocation(FEED_FORWARD + "expert_bias", without_suffix=True),
    )
    return short_conv_decoder(c, kinds, [gated_mlp if i < dense else experts for i in range(depth)], names)


def short_conv_decoder(
    c: ConfigReader, kinds: list[str], mlps: list[spec.Mlp | spec.Moe], names: TensorNames
) -> spec.Model:
    """A decoder with a short convolution, or attention with normalised heads, in each layer."""
    c = c.with_defaults(rope_theta=1e6)
    n = norm(c, "norm_eps")
    attn = attention(c, qk_norm=spec.QkNorm(n), qkv_bias=False, out_bias=False)
    conv = spec.ShortConv(c.size("hidden_size"), c.size("conv_L_cache", default=3), c.flag("conv_bias", default=False))
    layers = [
        spec.Layer(attn if kind == "full_attention" else conv, one, n, n) for kind, one in zip(kinds, mlps, strict=True)
    ]
    tied = c.flag("tie_embedding", default=True)
    return decoder(c, layers, final_norm=n, names=names, tied=tied)


def adjusted_width(c: ConfigReader) -> int:
    """The MLP's width: two thirds of `intermediate_size`, scaled and rounded up, unless that is turned off."""
    width = c.size("block_ff_dim", "intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = c.size("block_multiple_of", default=256)
    scaled = int(c.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    rounded = multiple * -(-scaled // multiple)
    if not 0 < rounded < MAX_SIZE:
        raise c.inconsistent(f"intermediate_size {width} makes an MLP of width {rounded}")
    return rounded
