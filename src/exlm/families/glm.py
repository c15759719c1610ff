"""GLM-4: norms before and after, half of each head turning in interleaved pairs, fused gate and up."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place
from .common import attention, decoder, mlp, norm
from .fused import gate_up
from .hyper import Hyper
from .rope import rope


def glm4(c: Hyper) -> spec.Model:
    """Four norms a layer; a bias on q, k and v unless the file says no, never on the output."""
    c = c.meaning(rms_norm_eps=1.5625e-7)
    n = norm(c)
    bias = c.flag("attention_bias", default=True)
    attn = attention(c, qkv_bias=bias, out_bias=False)
    attn = replace(attn, rope=rope(c, attn.head_dim, style="gptj", partial=0.5))
    block = mlp(c)
    names = Names().with_places(
        attn_post=Place(LAYER + "post_self_attn_layernorm"),
        mlp_norm=Place(LAYER + "post_attention_layernorm"),
        mlp_post=Place(LAYER + "post_mlp_layernorm"),
        **gate_up(block.width),
    )
    layer = spec.Layer(attn, block, n, n, attn_post=n, mlp_post=n)
    return decoder(c, [layer] * c.depth(), names=names)
