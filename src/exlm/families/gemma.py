"""Gemma 1 to 3 and GemMoE: scaled embeddings, norms stored as w - 1, windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import spec
from ..spec.names import LAYER, Names, Place, Rename
from .common import activation, attention, decoder, head_width, layered, mlp, moe, norm, windows
from .hyper import Hyper
from .mixtral import EXPERTS
from .rope import LOCAL, rope

FOUR_NORMS = {
    "attn_post": Place(LAYER + "post_attention_layernorm"),
    "mlp_norm": Place(LAYER + "pre_feedforward_layernorm"),
    "mlp_post": Place(LAYER + "post_feedforward_layernorm"),
}

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Of a Gemma 2 whose file does not mention them; null is none."""

VISION_PREFIXES = (
    Rename("model.language_model.", "model.", start=True),
    Rename("language_model.model.", "model.", start=True),
    Rename("language_model.lm_head.", "lm_head.", start=True),
)


def gemma(c: Hyper) -> spec.Model:
    """Llama with tanh-gelu and embeddings grown by the root of the width."""
    n = norm(c, offset=1.0)
    layer = spec.Layer(attention(c, **_heads(c)), _mlp(c), n, n)
    return _decoder(c, [layer] * c.depth(), n)


def gemmoe(c: Hyper) -> spec.Model:
    """Gemma with Mixtral's experts."""
    experts = moe(c, act=activation(c, "hidden_activation", default="gelu_pytorch_tanh"))
    model = layered(gemma(c), lambda _, layer: replace(layer, mlp=experts))
    return replace(model, names=Names().with_places(**EXPERTS))


def gemma2(c: Hyper) -> spec.Model:
    """Every other layer sees a window; norms before and after; caps on scores and logits."""
    c = c.filled(CAPS).meaning(sliding_window=4096)
    n, depth = norm(c, offset=1.0), c.depth()
    sizes = windows(c, depth, lambda i: i % 2 == 0)

    def layer(i: int) -> spec.Layer:
        attn = attention(c, **(_heads(c) | _scores(c)), window=sizes[i])
        return spec.Layer(attn, _mlp(c), n, n, attn_post=n, mlp_post=n)

    model = _decoder(c, [layer(i) for i in range(depth)], n)
    return replace(model, names=Names().with_places(**FOUR_NORMS), wide_residual=True)


def gemma3(c: Hyper) -> spec.Model:
    """Five layers in a window, then one that sees all and turns more slowly; normalised q and k."""
    # Without a window no layer would know that it is a local one; published files leave the length out too.
    c = c.meaning(sliding_window=4096, max_position_embeddings=131072)
    n, depth = norm(c, offset=1.0), c.depth()
    pattern = c.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    sizes = windows(c, depth, lambda i: (i + 1) % pattern != 0)
    fields = _heads(c) | _scores(c) | {"qk_norm": spec.QkNorm(n)}
    near, far = _two_ropes(c, fields["head_dim"])

    def layer(i: int) -> spec.Layer:
        attn = attention(c, **fields, window=sizes[i], rope=far if sizes[i] is None else near)
        return spec.Layer(attn, _mlp(c), n, n, attn_post=n, mlp_post=n)

    names = Names(rename=VISION_PREFIXES).with_places(**FOUR_NORMS)
    model = _decoder(c, [layer(i) for i in range(depth)], n, vocab=c.size("vocab_size", default=262208))
    return replace(model, names=names, wide_residual=True)


def _two_ropes(c: Hyper, head_dim: int) -> tuple[spec.Rope, spec.Rope]:
    """Local layers keep the trained rotation unless they have a table of their own that says otherwise."""
    near = rope(c, head_dim, layer_type=LOCAL, base_key="rope_local_base_freq")
    far = rope(c, head_dim, theta=1_000_000.0, layer_type="full_attention")
    return near, far


def _heads(c: Hyper) -> dict[str, Any]:
    """Gemma's own defaults for what its shorter config files leave out."""
    heads = c.size("num_attention_heads", default=8)
    kv = c.size("num_key_value_heads", default=4)
    width = head_width(c, heads, default=256)
    return {"heads": heads, "kv_heads": kv, "head_dim": width, "scale": width**-0.5}


def _scores(c: Hyper) -> dict[str, Any]:
    return {
        "scale": c.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        "softcap": c.positive("attn_logit_softcapping", default=None),
    }


def _mlp(c: Hyper) -> spec.Mlp:
    """`hidden_act` of the first files says plain gelu and never meant it."""
    return mlp(c, act=activation(c, "hidden_activation", default="gelu_pytorch_tanh"))


def _decoder(c: Hyper, layers: list[spec.Layer], n: spec.Norm, **changes: object) -> spec.Model:
    if c.flag("use_bidirectional_attention", default=False):
        raise c.wrong("use_bidirectional_attention", "false: text is made by seeing what came before", True)
    embed = spec.Embed(scale=c.size("hidden_size") ** 0.5)
    return decoder(c, layers, final_norm=n, tied=True, embed=embed, requires_bos=True, **changes)
