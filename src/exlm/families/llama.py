"""Llama 1 to 3, and the families that differ from Llama in tensor names, norms, windows or multipliers."""

from __future__ import annotations

import math
from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import attention, decoder, fused_gate_up, interleaved_qkv, layer_windows, map_layers, mlp, norm
from .config_reader import ConfigReader
from .rope import rope

INTERNLM2_KEY_RENAMES = (
    KeyRename("output.", "lm_head.", prefix_only=True),
    KeyRename("model.tok_embeddings.", "model.embed_tokens.", prefix_only=True),
    KeyRename(".attention.", ".self_attn."),
    KeyRename(".wo.", ".o_proj."),
)


def llama(c: ConfigReader) -> spec.Model:
    """RMSNorm, attention with RoPE, gated MLP."""
    layer = spec.Layer(attention(c), mlp(c), norm(c), norm(c))
    return decoder(c, [layer] * c.num_layers())


def yi(c: ConfigReader) -> spec.Model:
    """Llama; the first files call the norms ln1 and ln2."""
    names = TensorNames().with_locations(
        attn_norm=(TensorLocation(LAYER_PREFIX + "ln1"), TensorLocation(LAYER_PREFIX + "input_layernorm")),
        mlp_norm=(TensorLocation(LAYER_PREFIX + "ln2"), TensorLocation(LAYER_PREFIX + "post_attention_layernorm")),
    )
    return replace(llama(c), names=names)


def orion(c: ConfigReader) -> spec.Model:
    """Llama with LayerNorm in place of RMSNorm."""
    n = norm(c, kind="layer", bias=True)
    return replace(map_layers(llama(c), lambda _, x: replace(x, attn_norm=n, mlp_norm=n)), final_norm=n)


def granite(c: ConfigReader) -> spec.Model:
    """Llama with four multipliers: embedding, attention, residual, logits."""
    attn = attention(c, scale=c.positive("attention_multiplier", default=1.0))
    residual = c.real("residual_multiplier", default=1.0)
    return map_layers(llama(c), lambda _, layer: replace(layer, mixer=attn, residual_scale=residual))


def minicpm(c: ConfigReader) -> spec.Model:
    """Llama with muP: residuals scaled by depth, logits by the width of the tuned base model."""
    model = llama(c)
    residual = c.real("scale_depth", default=math.sqrt(c.num_layers())) / math.sqrt(c.num_layers())
    tied = c.top_level_flag("tie_word_embeddings", default=True)
    scale = c.real("dim_model_base", default=float(model.hidden)) / model.hidden
    head = replace(model.head, tied=tied, scale=scale)
    return replace(map_layers(model, lambda _, layer: replace(layer, residual_scale=residual)), head=head)


def smollm3(c: ConfigReader) -> spec.Model:
    """Llama in which every fourth layer, or those that `no_rope_layers` lists, have no RoPE (NoPE)."""
    depth, model = c.num_layers(), llama(c.with_defaults(rope_theta=2e6))
    model = replace(model, head=replace(model.head, tied=c.top_level_flag("tie_word_embeddings", default=True)))
    every = c.size("no_rope_layer_interval", default=4)
    rope_layers = c.get("no_rope_layers")
    if rope_layers is None:
        rope_layers = [int((i + 1) % every != 0) for i in range(depth)]
    if not isinstance(rope_layers, list) or len(rope_layers) != depth:
        raise c.invalid_value("no_rope_layers", f"a list of {depth} zeros and ones", rope_layers)
    use_windows = c.flag("use_sliding_window", default=False)
    sizes = layer_windows(c, depth, lambda i: not rope_layers[i]) if use_windows else [None] * depth

    def change(i: int, layer: spec.Layer) -> spec.Layer:
        return layer.with_attention(
            lambda attn: replace(attn, window=sizes[i], rope=attn.rope if rope_layers[i] else None)
        )

    return map_layers(model, change)


def olmo2(c: ConfigReader) -> spec.Model:
    """Llama with its norms after attention and MLP, and queries and keys normalised across all heads."""
    c = c.with_defaults(rms_norm_eps=1e-5)
    n = norm(c)
    attn = attention(c, qk_norm=spec.QkNorm(n, scope="all"))
    names = TensorNames().with_locations(
        attn_post=TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),
        mlp_post=TensorLocation(LAYER_PREFIX + "post_feedforward_layernorm"),
    )
    layer = spec.Layer(attn, mlp(c), None, None, attn_post=n, mlp_post=n)
    return decoder(c, [layer] * c.num_layers(), names=names)


def internlm2(c: ConfigReader) -> spec.Model:
    """Llama with other tensor names, q, k, v interleaved by KV head, and attention biases if `bias`."""
    bias = c.flag("bias", default=False)
    attn = attention(c, qkv_bias=bias, out_bias=bias)
    names = TensorNames(key_renames=INTERNLM2_KEY_RENAMES).with_locations(
        attn_norm=TensorLocation(LAYER_PREFIX + "attention_norm"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "ffn_norm"),
        mlp__gate=TensorLocation(LAYER_PREFIX + "feed_forward.w1"),
        mlp__up=TensorLocation(LAYER_PREFIX + "feed_forward.w3"),
        mlp__down=TensorLocation(LAYER_PREFIX + "feed_forward.w2"),
        **interleaved_qkv(attn, "self_attn.wqkv"),
    )
    return replace(map_layers(llama(c), lambda _, layer: replace(layer, mixer=attn)), names=names)


def glm4(c: ConfigReader) -> spec.Model:
    """Norms before and after attention and MLP; RoPE on half of each head, in interleaved pairs."""
    c = c.with_defaults(rms_norm_eps=1.5625e-7)
    n = norm(c)
    bias = c.flag("attention_bias", default=True)
    attn = attention(c, qkv_bias=bias, out_bias=False)
    attn = replace(attn, rope=rope(c, attn.head_dim, style="gptj", rotary_fraction=0.5))
    gated_mlp = mlp(c)
    names = TensorNames().with_locations(
        attn_post=TensorLocation(LAYER_PREFIX + "post_self_attn_layernorm"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),
        mlp_post=TensorLocation(LAYER_PREFIX + "post_mlp_layernorm"),
        **fused_gate_up(gated_mlp.width),
    )
    layer = spec.Layer(attn, gated_mlp, n, n, attn_post=n, mlp_post=n)
    return decoder(c, [layer] * c.num_layers(), names=names)
