"""Gemma 1 to 3 and GemMoE: scaled embeddings, norms stored as w - 1, windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from .common import (
    LANGUAGE_MODEL_PREFIXES,
    activation,
    attention,
    decoder,
    layer_windows,
    map_layers,
    mlp,
    moe,
    norm,
    resolve_head_dim,
)
from .config_reader import ConfigReader
from .mistral import EXPERT_LOCATIONS
from .rope import SLIDING_ATTENTION, rope

POST_NORMS = {
    "attn_post": TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),
    "mlp_norm": TensorLocation(LAYER_PREFIX + "pre_feedforward_layernorm"),
    "mlp_post": TensorLocation(LAYER_PREFIX + "post_feedforward_layernorm"),
}

SOFTCAP_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Softcaps of a Gemma 2 whose file leaves them out; null means none."""


def gemma(c: ConfigReader) -> spec.Model:
    """Llama with tanh-approximated GELU, and embeddings multiplied by the square root of the hidden size."""
    n = norm(c, offset=1.0)
    layer = spec.Layer(attention(c, **_head_shape(c)), _mlp(c), n, n)
    return _decoder(c, [layer] * c.num_layers(), n)


def gemmoe(c: ConfigReader) -> spec.Model:
    """Gemma with Mixtral's experts."""
    experts = moe(c, act=activation(c, "hidden_activation", default="gelu_pytorch_tanh"))
    model = map_layers(gemma(c), lambda _, layer: replace(layer, mlp=experts))
    return replace(model, names=TensorNames().with_locations(**EXPERT_LOCATIONS))


def gemma2(c: ConfigReader) -> spec.Model:
    """A sliding window in every other layer, norms before and after, softcaps on scores and logits."""
    c = c.with_missing_keys_filled(SOFTCAP_DEFAULTS).with_defaults(sliding_window=4096)
    n, depth = norm(c, offset=1.0), c.num_layers()
    sizes = layer_windows(c, depth, lambda i: i % 2 == 0)

    def layer(i: int) -> spec.Layer:
        attn = attention(c, **(_head_shape(c) | _score_scale_and_softcap(c)), window=sizes[i])
        return spec.Layer(attn, _mlp(c), n, n, attn_post=n, mlp_post=n)

    model = _decoder(c, [layer(i) for i in range(depth)], n)
    return replace(model, names=TensorNames().with_locations(**POST_NORMS), fp32_residual=True)


def gemma3(c: ConfigReader) -> spec.Model:
    """Five layers with a window, then one with full attention and a larger RoPE base; normalised q and k."""
    # Published files leave the window out too; without one all layers would count as global.
    c = c.with_defaults(sliding_window=4096, max_position_embeddings=131072)
    n, depth = norm(c, offset=1.0), c.num_layers()
    pattern = c.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    sizes = layer_windows(c, depth, lambda i: (i + 1) % pattern != 0)
    fields = _head_shape(c) | _score_scale_and_softcap(c) | {"qk_norm": spec.QkNorm(n)}
    local_rope, global_rope = _local_and_global_rope(c, fields["head_dim"])

    def layer(i: int) -> spec.Layer:
        attn = attention(c, **fields, window=sizes[i], rope=global_rope if sizes[i] is None else local_rope)
        return spec.Layer(attn, _mlp(c), n, n, attn_post=n, mlp_post=n)

    names = TensorNames(key_renames=LANGUAGE_MODEL_PREFIXES).with_locations(**POST_NORMS)
    model = _decoder(c, [layer(i) for i in range(depth)], n, vocab=c.size("vocab_size", default=262208))
    return replace(model, names=names, fp32_residual=True)


def _local_and_global_rope(c: ConfigReader, head_dim: int) -> tuple[spec.Rope, spec.Rope]:
    """RoPE of local layers, unscaled unless they have a table of their own, and of global layers."""
    local_rope = rope(c, head_dim, layer_type=SLIDING_ATTENTION, theta_key="rope_local_base_freq")
    global_rope = rope(c, head_dim, theta=1_000_000.0, layer_type="full_attention")
    return local_rope, global_rope


def _head_shape(c: ConfigReader) -> dict[str, Any]:
    """Heads, their size and the scale that follows, with Gemma's defaults for keys that published files leave out."""
    heads = c.size("num_attention_heads", default=8)
    kv = c.size("num_key_value_heads", default=4)
    width = resolve_head_dim(c, heads, default=256)
    return {"heads": heads, "kv_heads": kv, "head_dim": width, "scale": width**-0.5}


def _score_scale_and_softcap(c: ConfigReader) -> dict[str, Any]:
    return {
        "scale": c.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        "softcap": c.positive("attn_logit_softcapping", default=None),
    }


def _mlp(c: ConfigReader) -> spec.Mlp:
    """The MLP. `hidden_act` is not read: the first files have gelu there, and the models use gelu_tanh."""
    return mlp(c, act=activation(c, "hidden_activation", default="gelu_pytorch_tanh"))


def _decoder(c: ConfigReader, layers: list[spec.Layer], n: spec.Norm, **changes: object) -> spec.Model:
    if c.flag("use_bidirectional_attention", default=False):
        raise c.invalid_value("use_bidirectional_attention", "false: only causal attention is supported", True)
    embed = spec.Embed(scale=c.size("hidden_size") ** 0.5)
    return decoder(c, layers, final_norm=n, tied=True, embed=embed, requires_bos=True, **changes)
