"""GLM-4: norms before and after, RoPE on half of each head in interleaved pairs, fused gate and up."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from .common import attention, decoder, fused_gate_up, mlp, norm
from .config_reader import ConfigReader
from .rope import rope


def glm4(c: ConfigReader) -> spec.Model:
    """Four norms per layer; q, k and v have a bias unless the file says no, the output never."""
    c = c.with_defaults(rms_norm_eps=1.5625e-7)
    n = norm(c)
    bias = c.flag("attention_bias", default=True)
    attn = attention(c, qkv_bias=bias, out_bias=False)
    attn = replace(attn, rope=rope(c, attn.head_dim, style="gptj", rotary_fraction=0.5))
    block = mlp(c)
    names = TensorNames().with_locations(
        attn_post=TensorLocation(LAYER_PREFIX + "post_self_attn_layernorm"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),
        mlp_post=TensorLocation(LAYER_PREFIX + "post_mlp_layernorm"),
        **fused_gate_up(block.width),
    )
    layer = spec.Layer(attn, block, n, n, attn_post=n, mlp_post=n)
    return decoder(c, [layer] * c.num_layers(), names=names)
