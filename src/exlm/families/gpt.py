"""GPT-2, StarCoder 1 (GPTBigCode) and 2: LayerNorm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place, Rename
from .common import activation, attention, decoder, mlp, norm, windows, with_windows
from .fused import qkv
from .hyper import Hyper
from .rope import length

GPT2 = (
    Rename("transformer.", "", start=True),
    Rename("ln_f.", "model.norm.", start=True),
    Rename(".attn.c_proj.", ".self_attn.o_proj."),
    Rename(".attn.", ".self_attn."),
    Rename("h.", "model.layers.", start=True),
    Rename("wte.", "model.embed_tokens.", start=True),
    Rename("wpe.", "model.wpe.", start=True),
)


def gpt2(c: Hyper) -> spec.Model:
    """Learned positions; matrices stored the other way round."""
    return _gpt(c, kv_heads=c.size("n_head", "num_attention_heads"), transposed=True)


def bigcode(c: Hyper) -> spec.Model:
    """GPT-2 with one key/value head, matrices stored the usual way."""
    if not c.flag("multi_query", default=True):
        raise c.wrong("multi_query", "true (q, k, v are packed differently without it)", False)
    return _gpt(c, kv_heads=1, transposed=False)


def starcoder2(c: Hyper) -> spec.Model:
    """Rotary positions in GPT-2's clothes."""
    bias = c.flag("use_bias", default=True)
    n = norm(c, "norm_epsilon", "layer_norm_epsilon", kind="layer", bias=True)
    block = mlp(c, gated=False, bias=bias, act=activation(c, "hidden_act", default="gelu_pytorch_tanh"))
    layer = spec.Layer(attention(c, qkv_bias=bias, out_bias=bias), block, n, n)
    names = Names().with_places(mlp__up=Place(LAYER + "mlp.c_fc"), mlp__down=Place(LAYER + "mlp.c_proj"))
    model = decoder(c, [layer] * c.depth(), final_norm=n, tied=True, names=names)
    return with_windows(model, windows(c, c.depth(), lambda _: True))


def _gpt(c: Hyper, kv_heads: int, *, transposed: bool) -> spec.Model:
    hidden = c.size("n_embd", "hidden_size")
    n = norm(c, "layer_norm_epsilon", kind="layer", bias=True)
    attn = attention(c, rope=None, kv_heads=kv_heads, qkv_bias=True, out_bias=True)
    if not c.flag("scale_attn_weights", default=True):
        attn = replace(attn, scale=1.0)
    block = mlp(
        c,
        width=c.size("n_inner", "intermediate_size", default=4 * hidden),
        gated=False,
        bias=True,
        act=activation(c, "activation_function", default="gelu_new"),
    )
    names = Names(rename=GPT2).with_places(
        attn_norm=Place(LAYER + "ln_1"),
        mlp_norm=Place(LAYER + "ln_2"),
        attn__o=Place(LAYER + "self_attn.o_proj", transposed=transposed),
        mlp__up=Place(LAYER + "mlp.c_fc", transposed=transposed),
        mlp__down=Place(LAYER + "mlp.c_proj", transposed=transposed),
        **qkv(attn, "self_attn.c_attn", transposed=transposed),
    )
    fading = c.flag("scale_attn_by_inverse_layer_idx", default=False)
    scales = [attn.scale / (i + 1 if fading else 1) for i in range(c.depth())]
    layers = [spec.Layer(replace(attn, scale=scale), block, n, n) for scale in scales]
    embed = spec.Embed(positions=length(c))
    return decoder(c, layers, final_norm=n, tied=True, names=names, embed=embed)
