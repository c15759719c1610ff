"""Qwen: Llama with biased or normalised queries and keys, dense or sparse, alone or beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place, Rename
from .common import attention, layered, mlp, moe, norm, switched_windows, windows, with_windows
from .fused import stacked
from .hyper import Hyper
from .llama import llama

EXPERTS = {
    "mlp__router": Place(LAYER + "mlp.gate"),
    "mlp__experts__gate": Place(LAYER + "mlp.experts.{e}.gate_proj"),
    "mlp__experts__up": Place(LAYER + "mlp.experts.{e}.up_proj"),
    "mlp__experts__down": Place(LAYER + "mlp.experts.{e}.down_proj"),
}


def qwen2(c: Hyper) -> spec.Model:
    """Llama with biased q, k and v."""
    attn = attention(c, qkv_bias=True, out_bias=False)
    model = layered(llama(c), lambda _, layer: replace(layer, attn=attn))
    return with_windows(model, switched_windows(c, c.depth()))


def qwen3(c: Hyper) -> spec.Model:
    """Llama with normalised q and k heads."""
    attn = attention(c, qk_norm=spec.QkNorm(norm(c)))
    model = layered(llama(c), lambda _, layer: replace(layer, attn=attn))
    return with_windows(model, switched_windows(c, c.depth()))


def qwen3_moe(c: Hyper) -> spec.Model:
    """Qwen3 with experts in the layers the file names, plain MLPs in the others."""
    depth = c.depth()
    dense_only = c.get("mlp_only_layers") or []
    if not isinstance(dense_only, list):
        raise c.wrong("mlp_only_layers", "a list of layers", dense_only)
    step = c.size("decoder_sparse_step", default=1)
    attn = attention(c, qk_norm=spec.QkNorm(norm(c)))
    experts = moe(
        c,
        width=c.size("moe_intermediate_size"),
        renormalize=c.flag("norm_topk_prob", default=False),
    )

    def change(i: int, layer: spec.Layer) -> spec.Layer:
        sparse = i not in dense_only and (i + 1) % step == 0
        return replace(layer, attn=attn, mlp=experts if sparse else mlp(c))

    model = layered(llama(c), change)
    names = Names().with_places(**stacked(EXPERTS, experts.width, model.hidden))
    model = replace(model, names=names)
    used = c.flag("use_sliding_window", default=False)
    return with_windows(model, windows(c, depth, lambda _: True)) if used else model


def qwen2_vl(c: Hyper) -> spec.Model:
    """The language half of Qwen2-VL and 2.5-VL: Qwen2 with positions in three planes."""
    rename = (
        Rename("model.language_model.", "model.", start=True),
        Rename("model.visual.", "visual.", start=True),
    )
    c = c.meaning(rms_norm_eps=1e-5, rope_theta=1e6)
    return replace(qwen2(c), names=Names(rename=rename))
