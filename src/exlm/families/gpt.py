"""GPT-2, StarCoder 1 (GPTBigCode) and 2: LayerNorm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import activation, attention, decoder, fused_qkv, layer_windows, mlp, norm, with_windows
from .config_reader import ConfigReader
from .rope import max_positions

GPT2_KEY_RENAMES = (
    KeyRename("transformer.", "", prefix_only=True),
    KeyRename("ln_f.", "model.norm.", prefix_only=True),
    KeyRename(".attn.c_proj.", ".self_attn.o_proj."),
    KeyRename(".attn.", ".self_attn."),
    KeyRename("h.", "model.layers.", prefix_only=True),
    KeyRename("wte.", "model.embed_tokens.", prefix_only=True),
    KeyRename("wpe.", "model.wpe.", prefix_only=True),
)


def gpt2(c: ConfigReader) -> spec.Model:
    """Learned positions; matrices stored transposed."""
    return _gpt(c, kv_heads=c.size("n_head", "num_attention_heads"), transposed=True)


def bigcode(c: ConfigReader) -> spec.Model:
    """GPT-2 with one key/value head, matrices stored the usual way."""
    if not c.flag("multi_query", default=True):
        raise c.invalid_value("multi_query", "true (q, k, v are packed differently without it)", False)
    return _gpt(c, kv_heads=1, transposed=False)


def starcoder2(c: ConfigReader) -> spec.Model:
    """GPT-2 with RoPE."""
    bias = c.flag("use_bias", default=True)
    n = norm(c, "norm_epsilon", "layer_norm_epsilon", kind="layer", bias=True)
    plain_mlp = mlp(c, gated=False, bias=bias, act=activation(c, "hidden_act", default="gelu_pytorch_tanh"))
    layer = spec.Layer(attention(c, qkv_bias=bias, out_bias=bias), plain_mlp, n, n)
    names = TensorNames().with_locations(
        mlp__up=TensorLocation(LAYER_PREFIX + "mlp.c_fc"), mlp__down=TensorLocation(LAYER_PREFIX + "mlp.c_proj")
    )
    model = decoder(c, [layer] * c.num_layers(), final_norm=n, tied=True, names=names)
    return with_windows(model, layer_windows(c, c.num_layers(), lambda _: True))


def _gpt(c: ConfigReader, kv_heads: int, *, transposed: bool) -> spec.Model:
    hidden = c.size("n_embd", "hidden_size")
    n = norm(c, "layer_norm_epsilon", kind="layer", bias=True)
    attn = attention(c, rope=None, kv_heads=kv_heads, qkv_bias=True, out_bias=True)
    if not c.flag("scale_attn_weights", default=True):
        attn = replace(attn, scale=1.0)
    plain_mlp = mlp(
        c,
        width=c.size("n_inner", "intermediate_size", default=4 * hidden),
        gated=False,
        bias=True,
        act=activation(c, "activation_function", default="gelu_new"),
    )
    names = TensorNames(key_renames=GPT2_KEY_RENAMES).with_locations(
        attn_norm=TensorLocation(LAYER_PREFIX + "ln_1"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "ln_2"),
        attn__o=TensorLocation(LAYER_PREFIX + "self_attn.o_proj", transposed=transposed),
        mlp__up=TensorLocation(LAYER_PREFIX + "mlp.c_fc", transposed=transposed),
        mlp__down=TensorLocation(LAYER_PREFIX + "mlp.c_proj", transposed=transposed),
        **fused_qkv(attn, "self_attn.c_attn", transposed=transposed),
    )
    scale_by_layer = c.flag("scale_attn_by_inverse_layer_idx", default=False)
    scales = [attn.scale / (i + 1 if scale_by_layer else 1) for i in range(c.num_layers())]
    layers = [spec.Layer(replace(attn, scale=scale), plain_mlp, n, n) for scale in scales]
    embed = spec.Embed(learned_positions=max_positions(c))
    return decoder(c, layers, final_norm=n, tied=True, names=names, embed=embed)
