"""Mixtral: Mistral with a router in front of several MLPs."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from .common import map_layers, moe
from .config_reader import ConfigReader
from .llama import mistral
from .tensor_layouts import stacked_experts

EXPERT_LOCATIONS = {
    "mlp__router": TensorLocation(LAYER_PREFIX + "block_sparse_moe.gate"),
    "mlp__experts__gate": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w1"),
    "mlp__experts__up": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w3"),
    "mlp__experts__down": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w2"),
}


def mixtral(c: ConfigReader) -> spec.Model:
    """Two of eight experts for each token, unless the file says otherwise."""
    c = c.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6)
    experts = moe(c)
    model = map_layers(mistral(c), lambda _, layer: replace(layer, mlp=experts))
    return replace(
        model,
        names=TensorNames().with_locations(**stacked_experts(EXPERT_LOCATIONS, experts.width, model.hidden)),
    )
