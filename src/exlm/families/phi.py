"""Phi-3 and 4: Mistral whose files fuse q, k, v and gate, up; long rotary tables."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import TensorNames
from .common import fused_gate_up, fused_qkv
from .config_reader import ConfigReader
from .mistral import mistral


def phi3(c: ConfigReader) -> spec.Model:
    """Mistral's shape in fused tensors."""
    model = mistral(c.with_defaults(rms_norm_eps=1e-5))
    names = TensorNames().with_locations(
        **fused_qkv(model.layers[0].attn, "self_attn.qkv_proj"), **fused_gate_up(model.layers[0].mlp.width)
    )
    return replace(model, names=names)
