"""Llama 1 to 3 and the families that are Llama but for a name, a window or a multiplier."""

from __future__ import annotations

import math
from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place
from .common import attention, decoder, layered, mlp, norm, windows, with_windows
from .hyper import Hyper


def llama(c: Hyper) -> spec.Model:
    """RMSNorm, rotary attention, gated MLP: the shape everybody copied."""
    layer = spec.Layer(attention(c), mlp(c), norm(c), norm(c))
    return decoder(c, [layer] * c.depth())


def mistral(c: Hyper) -> spec.Model:
    """Llama with every layer's attention in a window, if the file names one."""
    return with_windows(llama(c), windows(c, c.depth(), lambda _: True))


def yi(c: Hyper) -> spec.Model:
    """Llama whose first files call the norms ln1 and ln2."""
    names = Names().with_places(
        attn_norm=(Place(LAYER + "ln1"), Place(LAYER + "input_layernorm")),
        mlp_norm=(Place(LAYER + "ln2"), Place(LAYER + "post_attention_layernorm")),
    )
    return replace(llama(c), names=names)


def orion(c: Hyper) -> spec.Model:
    """Llama with LayerNorm in place of RMSNorm."""
    n = norm(c, kind="layer", bias=True)
    return replace(layered(llama(c), lambda _, x: replace(x, attn_norm=n, mlp_norm=n)), final_norm=n)


def granite(c: Hyper) -> spec.Model:
    """Llama with four multipliers: embedding, attention, residual, logits."""
    attn = attention(c, scale=c.positive("attention_multiplier", default=1.0))
    residual = c.real("residual_multiplier", default=1.0)
    return layered(llama(c), lambda _, layer: replace(layer, attn=attn, residual_scale=residual))


def minicpm(c: Hyper) -> spec.Model:
    """Llama whose residual is scaled by depth and whose logits by the width it was tuned at."""
    model = llama(c)
    residual = c.real("scale_depth", default=math.sqrt(c.depth())) / math.sqrt(c.depth())
    tied = c.outer_flag("tie_word_embeddings", default=True)
    scale = c.real("dim_model_base", default=float(model.hidden)) / model.hidden
    head = replace(model.head, tied=tied, scale=scale)
    return replace(layered(model, lambda _, layer: replace(layer, residual_scale=residual)), head=head)


def smollm3(c: Hyper) -> spec.Model:
    """Llama in which every so many layers know no positions."""
    depth, model = c.depth(), llama(c.meaning(rope_theta=2e6))
    model = replace(model, head=replace(model.head, tied=c.outer_flag("tie_word_embeddings", default=True)))
    every = c.size("no_rope_layer_interval", default=4)
    turning = c.get("no_rope_layers")
    if turning is None:
        turning = [int((i + 1) % every != 0) for i in range(depth)]
    if not isinstance(turning, list) or len(turning) != depth:
        raise c.wrong("no_rope_layers", f"a list of {depth} zeros and ones", turning)
    used = c.flag("use_sliding_window", default=False)
    sizes = windows(c, depth, lambda i: not turning[i]) if used else [None] * depth

    def change(i: int, layer: spec.Layer) -> spec.Layer:
        attn = replace(layer.attn, window=sizes[i], rope=layer.attn.rope if turning[i] else None)
        return replace(layer, attn=attn)

    return layered(model, change)


def olmo2(c: Hyper) -> spec.Model:
    """Llama with its norms behind attention and MLP, and queries and keys normalised across all heads."""
    c = c.meaning(rms_norm_eps=1e-5)
    n = norm(c)
    attn = attention(c, qk_norm=spec.QkNorm(n, scope="all"))
    names = Names().with_places(
        attn_post=Place(LAYER + "post_attention_layernorm"),
        mlp_post=Place(LAYER + "post_feedforward_layernorm"),
    )
    layer = spec.Layer(attn, mlp(c), None, None, attn_post=n, mlp_post=n)
    return decoder(c, [layer] * c.depth(), names=names)
