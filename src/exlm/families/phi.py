"""Phi-3 and 4: Mistral whose files fuse q, k, v and gate, up; long rotary tables."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import Names
from .fused import gate_up, qkv
from .hyper import Hyper
from .llama import mistral


def phi3(c: Hyper) -> spec.Model:
    """Mistral's shape in fused tensors."""
    model = mistral(c.meaning(rms_norm_eps=1e-5))
    names = Names().with_places(
        **qkv(model.layers[0].attn, "self_attn.qkv_proj"), **gate_up(model.layers[0].mlp.width)
    )
    return replace(model, names=names)
