"""Mixtral: Mistral with a router in front of several MLPs."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place
from .common import layered, moe
from .fused import stacked
from .hyper import Hyper
from .llama import mistral

EXPERTS = {
    "mlp__router": Place(LAYER + "block_sparse_moe.gate"),
    "mlp__experts__gate": Place(LAYER + "block_sparse_moe.experts.{e}.w1"),
    "mlp__experts__up": Place(LAYER + "block_sparse_moe.experts.{e}.w3"),
    "mlp__experts__down": Place(LAYER + "block_sparse_moe.experts.{e}.w2"),
}


def mixtral(c: Hyper) -> spec.Model:
    """Two of eight experts for each token, unless the file says otherwise."""
    c = c.meaning(rms_norm_eps=1e-5, rope_theta=1e6)
    experts = moe(c)
    model = layered(mistral(c), lambda _, layer: replace(layer, mlp=experts))
    return replace(model, names=Names().with_places(**stacked(EXPERTS, experts.width, model.hidden)))
